import warnings

import pytest

from kvbaton import copy
from kvbaton.copy import fallback

KERNELS = {"numpy": fallback}
if copy.NATIVE:
    from kvbaton.copy import _kernel

    KERNELS["native"] = _kernel


@pytest.fixture(params=KERNELS, scope="module")
def kernel(request):
    """Both implementations of the copy kernel, one after the other."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", copy.SlowCopyWarning)
        fallback.warn_once("in tests")
    return KERNELS[request.param]

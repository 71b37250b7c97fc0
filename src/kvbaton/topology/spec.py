"""What may stand in a topology file. Plain data; `kvbaton.topology.read` says where a file differs from it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from kvbaton.layout.build import Placement
from kvbaton.layout.limits import MAX_TENSORS

Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
Order = Literal["NHD", "HND"]
Layers = int | str | list[int | str]


class AxisSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An axis of a tensor: its ``size``, and how tensor parallelism cuts it.

    ``cut``: ``whole`` (the default: every rank holds all of it), ``even`` (equal parts or a refusal), ``heads`` (equal
    parts, or the same head on several ranks). ``blocks`` instead of ``size``: parts that are cut each by itself.
    """

    size: Count | None = None
    cut: Literal["whole", "even", "heads"] = "whole"
    blocks: dict[str, Any] | None = None


class BlockSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A block of an axis: ``size`` indices in ``groups`` equal groups, which several ranks hold if they are too few."""

    size: Count
    groups: Count


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor with named axes, outermost first: each a size or an `AxisSpec`. ``token: null`` fixes the token axis."""

    axes: dict[str, Any]
    dtype: str = ""


class KindSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A kind by its numbers, as `kvbaton.layout.Kind` has them."""

    per: Literal["token", "request"] = "token"
    ratio: Count = 1
    window: int = 0
    tail: int = 0
    ring: bool = False
    reused: bool = True
    aux: bool = False


class ComponentSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One component of a model.

    What its tensors are is said in one of these ways:

    * ``heads``, ``head_dim`` (and ``value_dim``): keys and values of attention;
    * ``heads``, ``shape``: a recurrent state, a matrix for each head;
    * ``blocks``, ``columns``: the state of a short convolution, with blocks that are cut each by itself;
    * ``dim`` (and ``role``): one vector for each token, whole on every rank (latents, index keys);
    * ``fields``: small values that are sent last, ``{name: [dtype, count]}``;
    * ``tensors``: anything else, ``{role: {axes: {name: size}, dtype: ...}}``.
    """

    kind: str | dict[str, Any] | None = None
    layers: Layers = "all"
    window: int | None = None
    tail: int | None = None
    ratio: int | None = None
    page_size: Count | None = None
    dtype: str = ""
    heads: Count | None = None
    head_dim: Count | None = None
    value_dim: Count | None = None
    shape: list[Count] | None = None
    blocks: dict[str, Any] | None = None
    columns: Count | None = None
    dim: Count | None = None
    role: str = "latent"
    fields: dict[str, tuple[str, Count]] | None = None
    tensors: dict[str, Any] | None = None


class ModelSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model that is written out: the number of its layers, and its components by name."""

    layers: Annotated[int, msgspec.Meta(ge=1, le=MAX_TENSORS)]
    components: dict[str, Any]
    title: str = "model"
    dtype: str = "bfloat16"


class ContextSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Context parallelism: ``size`` ranks share the tokens in turns of ``unit`` tokens (the page size by default).

    ``inside_tp``: the ranks are those of tensor parallelism (decode context parallelism), and not as many times more.
    """

    size: Count = 1
    unit: Count | None = None
    inside_tp: bool = False


class ScaleSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The scales of a component's tensors, float32, each in a role of its own: that of the tensor and ``_scale``.

    Every index of ``axes`` has its own. Along an axis in ``blocks`` so many neighbours share one; along the axes that
    are not named all do. Where rows hold tokens, the axis ``token`` must be among ``axes``.
    """

    axes: list[str] = []
    blocks: dict[str, Count] = {}


class OverrideSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a deployment lays out one component, where that is not as the others.

    ``whole``: every rank holds all tokens of it, also under context parallelism. ``stage``: only that pipeline stage
    has it (``first``, ``last`` or a number). What its elements stand for is ``stored * factor * scale``.
    """

    page_size: Count | None = None
    order: Order | None = None
    placement: Placement | None = None
    dtype: str = ""
    factor: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    scale: dict[str, Any] | None = None
    whole: bool = False
    stage: int | Literal["first", "last"] | None = None


class TopologySpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A topology file: a model, and how one side serves it."""

    model: str | dict[str, Any]
    title: str = ""
    tp: Count = 1
    pp: Count | list[Layers] = 1
    cp: Count | dict[str, Any] = 1
    dp: Count = 1
    page_size: Count = 16
    order: Order = "NHD"
    placement: Placement = "layers_first"
    dtype: str = ""
    striped: bool = True
    cast: bool = False
    transport: str | tuple[str, ...] = ("shm", "tcp")
    components: dict[str, Any] = msgspec.field(default_factory=dict)

"""SGLang's receiver of one request over a kvbaton `Receiver`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt
from sglang.srt.disaggregation.base.conn import KVPoll, KVTransferDestination
from sglang.srt.disaggregation.common.conn import CommonKVReceiver, KVTransferError

from kvbaton.errors import DeadlineExceeded, KVBatonError, RoomError, TransferAborted, TransferFailed
from kvbaton.protocol import Status
from kvbaton.runtime.rooms import Receiver

if TYPE_CHECKING:
    from kvbaton.engines.sglang.manager import KvbatonKVManager

logger = logging.getLogger(__name__)

ABORTED = "aborted by the decode scheduler"
_NOTHING_NEW = (TransferAborted, DeadlineExceeded)
"""Errors that say nothing against what is known of the prefill side."""


class KvbatonKVReceiver(CommonKVReceiver):
    """Made for each request on every rank of a decode replica; called by the scheduler and its helper threads."""

    kv_mgr: KvbatonKVManager

    def __init__(self, mgr: KvbatonKVManager, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        self._room: Receiver | None = None
        self._over = threading.Lock()
        """As `KvbatonKVSender._over`."""
        self._cleared = False
        self._wanted = False
        self._offer: tuple[Any, ...] | None = None
        self._reason = ""
        self.prompt_tokens: int | None = None
        """How many tokens the request has, where the scheduler's hook has told it before `send_metadata`."""
        self.bootstrap_infos: list[dict[str, Any]] | None = None
        super().__init__(mgr, bootstrap_addr, bootstrap_room)

    # Called by the scheduler. `init`, `abort` and `ensure_abort_notified` are SGLang's own.

    def poll(self) -> int:
        """SGLang's state of the room on this rank."""
        self._open()
        return int(super().poll())

    def send_metadata(
        self,
        kv_indices: Sequence[int] | npt.NDArray[np.int32],
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        decode_prefix_len: int | None = None,
        destination: KVTransferDestination = KVTransferDestination.DEVICE,
        device_kv_indices: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """Offer the pages after the prefix, the states and the row of metadata: prefill writes into them."""
        if destination != KVTransferDestination.DEVICE:
            raise NotImplementedError("kvbaton: host destinations are not served")
        pages = np.array(kv_indices, np.int64)
        self._offer = (pages, aux_index, state_indices, int(decode_prefix_len or 0), device_kv_indices)
        self.init_time = time.time()
        self._open()
        self._send_offer()

    def failure_exception(self) -> NoReturn:
        """Forget the room and raise why it failed."""
        self.conclude_state = KVPoll.Failed
        with self.kv_mgr.failure_lock:
            recorded = self.kv_mgr.failure_records.pop(self.bootstrap_room, None)
        # Before `clear`, which aborts a room that failed on another rank only.
        reason = self._reason or recorded
        self.clear()
        raise KVTransferError(
            self.bootstrap_room, reason or "another rank of this side failed", is_from_another_rank=reason is None
        )

    def clear(self) -> None:
        """The scheduler is done with the request; a room that has not ended is aborted."""
        self._close()
        with self._over:
            if self._cleared:
                return
            self._cleared = True
            super().clear()

    def is_abort_release_safe(self) -> bool:
        """Whether nothing writes into the pages of this request any more."""
        return self._room is None or self._room.rows_released

    # Called by SGLang's own `init`, `abort` and timeout.

    def _setup_bootstrap_infos(self) -> None:
        # One entry, for one answer: when kvbaton says that the rows are released, it speaks for all prefill ranks.
        self.bootstrap_infos = [{"bootstrap_addr": self.bootstrap_addr, "is_dummy": False}]
        self._wanted = True
        self._open()

    def invalidate_cached_bootstrap_infos(self) -> None:
        """Ask anew about the prefill side before the next request."""
        self.kv_mgr.forget_prefill(self.bootstrap_addr)

    def _send_abort_notification(self, *, force_arm: bool = False) -> None:
        self._wanted = False
        self._close()
        published = force_arm or self.init_time is not None
        if self._room is not None and published and self.kv_mgr.enable_deferred_decode_kv_release:
            self.kv_mgr.hold(self.bootstrap_room, self._room)

    # Called by the manager's watch, on kvbaton's control thread.

    def room_offered(self) -> None:
        """Our own offer: nothing new."""

    def room_ended(self, status: Status, reason: str, error: type[TransferFailed] | None) -> None:
        """Everything is in place, or the room failed."""
        if status is Status.SUCCESS:
            self._change(KVPoll.Success)
            return
        if error is not None and not issubclass(error, _NOTHING_NEW):
            self.kv_mgr.forget_prefill(self.bootstrap_addr)
        self._reason = self._reason or reason
        self._change(KVPoll.Failed)

    # Below: how it is done.

    def _open(self) -> None:
        if not self._wanted or self._room is not None or self.conclude_state is not None:
            return
        try:
            with self.kv_mgr.watch.opening(self):
                self._room = self.kv_mgr.receiver(self.bootstrap_room, self.bootstrap_addr, self.prefill_dp_rank)
        except RoomError as error:
            # An earlier life of the room still drains.
            logger.debug("%s", error)
        except KVBatonError as error:
            self._fail(str(error))
        self._send_offer()

    def _send_offer(self) -> None:
        room, described = self._room, self.kv_mgr.described
        if room is None or self._offer is None or described is None:
            return
        pages, aux_index, state_indices, prefix, device_pages = self._offer
        self._offer = None
        tokens = self.prompt_tokens
        if tokens is None:
            tokens = prefix + len(pages) * self.kv_mgr.kv_args.page_size
        try:
            tokens = described.tokens(tokens)
            rows = described.kv_rows(pages, prefix, device_pages=device_pages)
            state = described.state_rows(state_indices, tokens, prefix)
            paged = {name: held for name, (held, _) in state.paged.items()}
            room.offer({**rows, **paged, **state.slots}, tokens, prefix, aux=aux_index)
        except KVBatonError as error:
            self._fail(str(error))

    def _fail(self, reason: str) -> None:
        self._reason = self._reason or reason
        if self._room is not None:
            self._room.abort(reason)
        self._change(KVPoll.Failed)

    def _change(self, state: int) -> None:
        with self._over:
            if not self._cleared:
                self.kv_mgr.update_status(self.bootstrap_room, state)

    def _close(self) -> None:
        if self._room is not None:
            if not self._room.poll().terminal:
                self._room.abort(self._reason or ABORTED)
            self._room.close()

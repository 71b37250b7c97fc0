"""SGLang's sender of one request over a kvbaton `Sender`."""

from __future__ import annotations

import functools
import logging
import threading
import time
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from sglang.srt.disaggregation.base.conn import KVPoll, KVTransferMetric
from sglang.srt.disaggregation.common.conn import CommonKVSender, KVTransferError

from kvbaton.engines.sglang.chunks import Chunk, Chunks, length
from kvbaton.errors import KVBatonError, RoomError, TransferFailed
from kvbaton.protocol import Status
from kvbaton.runtime.rooms import Sender

if TYPE_CHECKING:
    from kvbaton.engines.sglang.manager import KvbatonKVManager

logger = logging.getLogger(__name__)

ABORTED = "aborted by the prefill scheduler"


class KvbatonKVSender(CommonKVSender):
    """Made for each request on every rank of a prefill replica; called by the scheduler only.

    Its state is what SGLang keeps of the room. A room whose number still drains from an earlier life is opened by a
    later `poll`.
    """

    kv_mgr: KvbatonKVManager
    _transfer_start_time: float | None
    _early_send_wait_event: Any

    def __init__(
        self,
        mgr: KvbatonKVManager,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
    ) -> None:
        self._room: Sender | None = None
        self._over = threading.Lock()
        """Held while SGLang's table of states is changed for this room, or for good: no event counts after `clear`."""
        self._cleared = False
        self._reason = ""
        self._chunks = Chunks(mgr.kv_args.page_size)
        super().__init__(mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank)
        self._open()

    @property
    def supports_host_tensor_indices(self) -> bool:
        """Whether page indices may come as a tensor that is still on its way from the GPU, with an event."""
        return self.kv_mgr.memory != "host"

    # Called by the scheduler.

    def poll(self) -> int:
        """SGLang's state of the room on this rank."""
        self._open()
        return int(super().poll())

    def poll_pp_consensus(self) -> int:
        """The least state over the pipeline stages, on the first of them."""
        self._open()
        return int(super().poll_pp_consensus())

    def pop_decode_prefix_len(self) -> int:
        """Tokens that decode has already, in whole pages of this side."""
        offered = self._room.offered if self._room is not None else None
        return self._chunks.skip(0 if offered is None else offered.prefix)

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """``num_kv_indices`` pages are to be sent, and the metadata in row ``aux_index`` with the last of them."""
        super().init(num_kv_indices, aux_index)
        self._chunks.begin(num_kv_indices)

    def send(
        self,
        kv_indices: Any,
        state_indices: list[Any] | None = None,
        num_kv_tokens: int | None = None,
        indices_event: Any | None = None,
    ) -> None:
        """The next pages are complete, or will be when the events that came with them have happened.

        ``kv_indices`` are page indices: a sequence or an array, or with ``indices_event`` a tensor to be read after it.
        """
        if self.conclude_state in (KVPoll.Success, KVPoll.Failed) or self._room is None:
            return
        pages = np.array(kv_indices, np.int64) if indices_event is None else kv_indices
        chunk = self._chunks.take(len(pages), num_kv_tokens)
        self.curr_idx += len(pages)
        if self._transfer_start_time is None:
            self._transfer_start_time = time.perf_counter()
        self._change(KVPoll.Transferring)
        events = [event for event in (self._early_send_wait_event, indices_event) if event is not None]
        self._early_send_wait_event = None
        step = functools.partial(self._submit, self._room, pages, chunk, state_indices)
        self.kv_mgr.after_events.run(self, events, step, self._fail)

    def get_transfer_metric(self) -> KVTransferMetric:
        """Seconds from the first chunk to the end, and the bytes that this rank sent."""
        moved = self._room.bytes_by_component if self._room is not None else {}
        self._transfer_metric.transfer_total_bytes = sum(moved.values())
        return self._transfer_metric

    def abort(self) -> None:
        """The request is given up; decode is told. The scheduler may never call this object again."""
        self._reason = self._reason or ABORTED
        self._change(KVPoll.Failed)
        self.conclude_state = KVPoll.Failed
        self.trace_ctx.abort(abort_info={"reason": "Aborted"})
        self._close()
        if isinstance(self.kv_mgr.request_status, dict):
            self._forget()

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
        self._forget()

    # Called by the manager's watch, on kvbaton's control thread.

    def room_offered(self) -> None:
        """Decode has said where the data belong."""
        self._change(KVPoll.WaitingForInput)

    def room_ended(self, status: Status, reason: str, error: type[TransferFailed] | None) -> None:
        """Everything was sent, or the room failed."""
        if status is Status.SUCCESS:
            self._change(KVPoll.Success)
        else:
            self._reason = self._reason or reason
            self._change(KVPoll.Failed)

    # Below: how it is done.

    def _open(self) -> None:
        if self._room is not None or self.conclude_state is not None or self._cleared:
            return
        if self.kv_mgr.request_status.get(self.bootstrap_room) == KVPoll.Failed:
            return
        try:
            with self.kv_mgr.watch.opening(self):
                self._room = self.kv_mgr.sender(self.bootstrap_room)
        except RoomError as error:
            logger.debug("%s", error)
        except KVBatonError as error:
            self._fail(str(error))

    def _submit(self, room: Sender, pages: Any, chunk: Chunk, states: list[Any] | None) -> None:
        described = self.kv_mgr.described
        assert described is not None
        try:
            rows = described.kv_rows(np.asarray(pages), chunk.first)
            if not chunk.final:
                room.send(rows, tokens=(chunk.first, chunk.last))
                return
            exact = described.tokens(chunk.last)
            last = exact if room.offered is None else length(exact, room.offered.tokens, self._chunks.page_size)
            state = described.state_rows(states, last, self._chunks.prefix)
            for name, (held, span) in state.paged.items():
                room.send({name: held}, tokens=span)
            room.finish({**rows, **state.slots}, (min(chunk.first, last), last), aux=self.aux_index)
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

    def _forget(self) -> None:
        with self._over:
            if self._cleared:
                return
            self._cleared = True
            if self.conclude_state is None:
                status = self.kv_mgr.request_status.get(self.bootstrap_room)
                self.conclude_state = status if status == KVPoll.Success else KVPoll.Failed
            self.kv_mgr.request_status.pop(self.bootstrap_room, None)
        self.trace_ctx.trace_req_finish()

"""SGLang's KV manager over a kvbaton `Manager`: one for each scheduler process, made once."""

from __future__ import annotations

import logging
import os
import time
from typing import Any, Literal

import requests
from sglang.srt.disaggregation.common.conn import CommonKVManager, PrefillServerInfo
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_device, get_disagg, get_parallel
from sglang.srt.utils.network import NetworkAddress

from kvbaton.engines.sglang import environment
from kvbaton.engines.sglang.bootstrap import registry_url
from kvbaton.engines.sglang.events import AfterEvents
from kvbaton.engines.sglang.layout import Described, Facts, Ranks, describe, facts_of
from kvbaton.engines.sglang.watch import RoomWatch
from kvbaton.errors import AuthenticationError, ConfigurationError, RegistryError
from kvbaton.registry import HttpRegistry, RegistryUnreachable
from kvbaton.runtime.manager import Manager, Role
from kvbaton.runtime.rooms import Receiver, Room, Sender

logger = logging.getLogger(__name__)

REGISTRY_SECONDS = 60.0
"""How long a prefill rank waits for the bootstrap server, which another process starts."""
INFO_SECONDS = 5.0


class KvbatonKVManager(CommonKVManager):
    """What SGLang's scheduler asks of a transfer back-end; the hand-over itself is kvbaton's.

    The states of rooms are kept where SGLang looks for them (``request_status``), so that all of its own logic holds:
    the consensus of pipeline stages, timeouts, and that a failed room stays failed. Raises `KVBatonError` for memory
    that cannot be described, options that cannot be served, and where no transport works.
    """

    supports_deferred_decode_kv_release = True
    supports_role_switch = True
    reports_transfer_latency = True

    def __init__(
        self,
        args: Any,
        disaggregation_mode: DisaggregationMode,
        server_args: Any,
        is_mla_backend: bool = False,
    ) -> None:
        self.role: Role = "prefill" if disaggregation_mode == DisaggregationMode.PREFILL else "decode"
        self.watch = RoomWatch()
        self.after_events = AfterEvents(f"kvbaton-{self.role}-events")
        self.baton: Manager | None = None
        self.described: Described | None = None
        self.memory = _memory_kind()
        """Where the pools are."""
        self._held: dict[int, Room] = {}
        """Rooms that failed, whose pages the scheduler holds until nothing is written into them any more."""
        policy = get_disagg().disaggregation_decode_allocation_policy
        if policy != "early":
            raise ConfigurationError(
                f"kvbaton does not serve --disaggregation-decode-allocation-policy {policy}; leave it at 'early'"
            )
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        # All context-parallel ranks of prefill hold the same pages: kvbaton's plan says who of them sends what.
        self.enable_all_cp_ranks_for_transfer = False
        self.is_dummy_cp_rank = False
        if self.role == "decode":
            self._start()

    # What a sender or a receiver asks.

    def sender(self, room: int) -> Sender:
        """A kvbaton sender. Raises `RoomError` while an earlier life of the room still drains."""
        return self._running().sender(room)

    def receiver(self, room: int, address: str, dp_rank: int) -> Receiver:
        """A kvbaton receiver for a room of the prefill side at ``address``. Raises as `sender`."""
        return self._running().receiver(room, source=registry_url(address), dp_rank=dp_rank)

    def hold(self, number: int, room: Room) -> None:
        """Answer for a failed room in `is_abort_release_safe`."""
        self._held[number] = room

    def forget_prefill(self, address: str) -> None:
        """Ask anew about the prefill side at ``address`` before the next request: it may have been restarted."""
        self.prefill_info_table.pop(address, None)

    def _running(self) -> Manager:
        if self.baton is None:
            raise ConfigurationError("kvbaton: the KV manager is shut down, or its memory is released")
        return self.baton

    # Called by the scheduler.

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """Whether it is proven that nothing writes into the pages of a failed room any more."""
        held = self._held.get(bootstrap_room)
        return held is None or held.rows_released

    def clear_deferred_abort_state(self, bootstrap_room: int) -> None:
        """The pages of a failed room are used again."""
        self._held.pop(bootstrap_room, None)

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Fetch what SGLang wants to know of a prefill side; False to be asked again.

        Whether the two sides fit together is found out by kvbaton's handshake, which fails the rooms with the reason.
        """
        if bootstrap_addr in self.prefill_info_table:
            return True
        question = "prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
        try:
            response = requests.get(f"http://{bootstrap_addr}/route?{question}", timeout=INFO_SECONDS)
            if response.status_code != 200:
                logger.error("prefill %s is not ready: %d %s", bootstrap_addr, response.status_code, response.text)
                return False
            info = PrefillServerInfo(**response.json())
        except Exception as error:
            logger.error("the bootstrap server %s cannot be asked: %s", bootstrap_addr, error)
            return False
        self._resolve_rank_mapping(info)
        self.prefill_info_table[bootstrap_addr] = info
        return True

    def _resolve_rank_mapping(self, info: PrefillServerInfo) -> None:
        """To SGLang the whole prefill side is one rank that answers once: kvbaton knows the ranks, and counts them."""
        info.target_tp_rank = 0
        info.target_tp_ranks = info.target_cp_ranks = info.target_pp_ranks = [0]
        info.required_dst_info_num = info.required_prefill_response_num = 1

    def register_to_bootstrap(self) -> None:
        """Register with kvbaton's registry, then with SGLang's: who finds the ranks in that one finds them in both."""
        self._start()
        super().register_to_bootstrap()

    def register_buffer_to_engine(self) -> None:
        """The memory is there again, at the same addresses."""
        if self.baton is None:
            self._start()

    def deregister_buffer_to_engine(self) -> None:
        """The memory goes away: open rooms fail."""
        self._stop()

    def teardown(self) -> None:
        """Leave this role: open rooms fail, peers are told, and every thread and socket ends. The memory stays."""
        self._stop()
        self.after_events.close()
        if self.role == "decode":
            self._heartbeat_shutdown.set()
            if self._prefill_recompute_executor is not None:
                self._prefill_recompute_executor.shutdown(wait=False, cancel_futures=True)
        elif not isinstance(self.request_status, dict):
            self.request_status.close()
        self._zmq_ctx.destroy(linger=0)

    # Made and closed with the memory.

    def _start(self) -> None:
        args = self.kv_args
        self.described = describe(args, self._ranks(), device=self.memory)
        wanted = environment.transports(os.environ)
        url = self._own_registry() if self.role == "prefill" else None
        if url is not None:
            _wait_for(url)
        self.baton = Manager(
            self.described.layout,
            self.described.regions,
            role=self.role,
            registry=url,
            model="sglang" if self.kv_layout is None else f"sglang, kv_layout {self.kv_layout}",
            transports=wanted,
            transport_options=environment.device_options(wanted, _devices(args)),
            bind=self.local_ip,
            settings=environment.settings(self.role, self._timeouts(), os.environ),
            observers=[self.watch],
        )
        logger.info("kvbaton: %s rank with the transports %s", self.role, ", ".join(self.baton.transports))

    def _stop(self) -> None:
        baton, self.baton = self.baton, None
        if baton is not None:
            baton.close()

    def _ranks(self) -> Ranks:
        dp = (self.attn_dp_rank, self.attn_dp_size)
        if self.system_dp_size > 1:
            dp = (self.system_dp_rank, self.system_dp_size)
        facts, start = self._facts()
        return Ranks(
            role=self.role,
            tp=(self.attn_tp_rank, self.attn_tp_size),
            pp=(self.pp_rank, self.pp_size),
            cp=(self.attn_cp_rank, self.attn_cp_size),
            dp=dp,
            dcp=(self.dcp_rank, self.dcp_size),
            state_tp=_state_ranks(self.attn_tp_rank, self.attn_tp_size, self.state_tp_size),
            is_mla=self.is_mla_backend,
            start_layer=start,
            kv_cache_layout=os.environ.get("SGLANG_AITER_KV_CACHE_LAYOUT") or None,
            **facts._asdict(),
        )

    def _facts(self) -> tuple[Facts, int | None]:
        """What the model's config says, and the first layer of this stage where SGLang's arguments lack it."""
        if not hasattr(self.server_args, "model_path"):
            # Managers without a server, as in benchmarks: the arguments say all there is.
            return Facts(None, None, None, {}), None
        model = _model_config(self.server_args)
        if self.pp_size == 1:
            return facts_of(model), None
        from sglang.srt.distributed.utils import get_pp_indices

        stage = get_pp_indices(model.num_hidden_layers, self.pp_rank, self.pp_size)
        return facts_of(model, stage), stage[0] if self.role == "decode" else None

    def _timeouts(self) -> environment.Timeouts:
        prefix = "SGLANG_DISAGGREGATION_"
        misses = max(getattr(envs, f"{prefix}HEARTBEAT_MAX_FAILURE").get(), 1)
        return environment.Timeouts(
            bootstrap=getattr(envs, f"{prefix}BOOTSTRAP_TIMEOUT").get(),
            waiting=getattr(envs, f"{prefix}WAITING_TIMEOUT").get(),
            release=getattr(envs, f"{prefix}DEFERRED_DECODE_KV_RELEASE_TIMEOUT").get(),
            lost=max(getattr(envs, f"{prefix}HEARTBEAT_INTERVAL").get(), 2.0) * misses,
        )

    def _own_registry(self) -> str:
        """The url of the registry for the ranks of this prefill side, as SGLang finds its bootstrap server."""
        if self.dist_init_addr:
            host = NetworkAddress.parse(self.dist_init_addr).resolved().host
        else:
            host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.bootstrap_host, self.bootstrap_host)
        return registry_url(NetworkAddress(host, self.bootstrap_port).to_host_port_str())


def _state_ranks(rank: int, size: int, states: int) -> tuple[int, int] | None:
    return None if states == size else (get_parallel().tp_rank % states, states)


def _memory_kind() -> Literal["host", "cuda"]:
    device = str(get_device().device).partition(":")[0]
    if device not in ("cpu", "cuda"):
        raise ConfigurationError(f"kvbaton reaches memory of the host and of CUDA and ROCm devices, not of {device!r}")
    return "host" if device == "cpu" else "cuda"


def _model_config(server_args: Any) -> Any:
    from sglang.srt.arg_groups.overrides import model_config_of

    return model_config_of(server_args)


def _devices(args: Any) -> str:
    """The network devices of ``--disaggregation-ib-device`` for this rank's GPU."""
    given = getattr(args, "ib_device", None)
    if not given:
        return ""
    from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import get_ib_devices_for_gpu

    return get_ib_devices_for_gpu(given, args.gpu_id) or ""


def _wait_for(url: str) -> None:
    """Return when the registry answers. Raises `RegistryError` if it does not in time, or if it is none."""
    client, until, pause = HttpRegistry(url), time.monotonic() + REGISTRY_SECONDS, 0.05
    while True:
        try:
            client.heartbeat("nobody")
        except RegistryUnreachable:
            if time.monotonic() > until:
                raise
        except AuthenticationError:
            raise
        except RegistryError as error:
            raise RegistryError(
                f"the bootstrap server does not serve kvbaton's registry: {error}. Start every process of this side "
                "with --disaggregation-transfer-backend kvbaton"
            ) from error
        else:
            return
        time.sleep(pause)
        pause = min(2 * pause, 1.0)

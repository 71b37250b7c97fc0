"""Timelines: what a trace must hold for ui.perfetto.dev, of one process and of the files of several."""

import json
import logging
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from heard import settle
from rank_world import wait, wait_over, wait_released
from room_pairs import KV, Gate, hand_over, pair, start

from kvbaton import errors
from kvbaton.cli.main import main
from kvbaton.observe import Timeline, TraceFolder
from kvbaton.observe.environment import TRACE_VARIABLE
from kvbaton.observe.perfetto import trace_of, write_trace
from kvbaton.observe.timeline import Recording, read_recording
from kvbaton.transport.loopback import LoopbackTransport


def check_trace(trace):
    """Raise unless the trace is well formed: returns its tracks as ``{(process, track): [event...]}``."""
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    tracks, stacks, latest = defaultdict(list), defaultdict(list), {}
    names = {}
    for event in json.loads(json.dumps(trace))["traceEvents"]:
        key = (event["pid"], event["tid"])
        assert event["ph"] in "MBEi"
        assert event["name"]
        if event["ph"] == "M":
            assert not latest, "metadata comes first"
            names[(*key, event["name"])] = event["args"]
            continue
        # Microseconds from the first event, in order on each track.
        assert isinstance(event["ts"], float)
        assert event["ts"] >= latest.get(key, 0.0) >= 0.0
        latest[key] = event["ts"]
        if event["ph"] == "B":
            stacks[key].append(event["name"])
        elif event["ph"] == "E":
            assert stacks[key].pop() == event["name"]
        else:
            assert event["s"] == "t"
        tracks[key].append(event)
    assert {key: stack for key, stack in stacks.items() if stack} == {}, "every begin has its end"
    for process, track in tracks:
        assert (process, 0, "process_name") in names
        assert (process, track, "thread_name") in names
    return {(names[(*key[:1], 0, "process_name")]["name"], names[(*key, "thread_name")]["name"], key): events
            for key, events in tracks.items()}  # fmt: skip


def tracks_of(checked, side, name):
    return [events for (process, track, _), events in checked.items() if process.startswith(side) and track == name]


def slices(events):
    return [event["name"] for event in events if event["ph"] == "B"]


def instants(events):
    return [event["name"] for event in events if event["ph"] == "i"]


def test_both_sides_of_a_room_are_drawn(world):
    timeline = Timeline()
    source, destination = pair(world, observers=[timeline])
    hand_over(source, destination, 12)
    settle(world)
    checked = check_trace(trace_of(timeline.recordings()))
    for side in ("prefill", "decode"):
        (room,) = tracks_of(checked, side, "room 12")
        assert slices(room) == ["room 12", "waiting", "transfer", "release"]
    (chunks,) = tracks_of(checked, "prefill", "room 12 chunks")
    assert slices(chunks) == ["chunk to 0"]
    nbytes = 2 * sum(tensor.row_stride for tensor in KV.layout().components[0].tensors)
    assert chunks[0]["args"]["bytes"] == {"kv": nbytes}
    (decode,) = tracks_of(checked, "decode", "room 12")
    assert sorted(instants(decode)) == ["connected", "delivered", "offered"]
    for side in ("prefill", "decode"):
        (peers,) = tracks_of(checked, side, "peers")
        assert instants(peers) == ["peer joined"]
    # Prefill ranks stand above decode ranks.
    assert {process.split()[0]: key[0] for process, _, key in checked} == {"prefill": 1, "decode": 2}


def test_one_clock_orders_what_one_side_does_after_the_other(world):
    """Nothing is delivered before the write of it has ended."""
    timeline = Timeline()
    source, destination = pair(world, observers=[timeline])
    for room in range(4):
        hand_over(source, destination, room)
        settle(world)
    checked = check_trace(trace_of(timeline.recordings()))
    for room in range(4):
        (chunks,) = tracks_of(checked, "prefill", f"room {room} chunks")
        (decode,) = tracks_of(checked, "decode", f"room {room}")
        (delivered,) = [event for event in decode if event["name"] == "delivered"]
        assert chunks[-1]["ts"] <= delivered["ts"]


def test_a_failure_is_an_instant_and_held_rows_a_slice(world):
    timeline, gate = Timeline(), Gate()
    (source,) = world.prefill(KV.layout(), transports=[LoopbackTransport("gated", fail=gate)], observers=[timeline])
    (destination,) = world.decode(KV.layout(), observers=[timeline])
    sender, receiver = start(source, destination)
    sender.finish({"kv": [0, 1]}, (0, 8))
    gate.wait_entered()
    sender.abort("enough")
    wait_over(sender, receiver)
    settle(world)
    # The recording may be drawn while it goes on: what is open ends with it.
    (unfinished,) = tracks_of(check_trace(trace_of(timeline.recordings())), "prefill", "room 0")
    assert unfinished[-1]["args"] == {"unfinished": True}
    gate.open()
    wait_released(sender, receiver)
    settle(world)
    wait(lambda: [event["event"] for event in timeline.recordings()[0].events].count("released") == 1)
    checked = check_trace(trace_of(timeline.recordings()))
    (room,) = tracks_of(checked, "prefill", "room 0")
    assert "failed: TransferAborted" in instants(room)
    (failure,) = [event for event in room if event["name"] == "failed: TransferAborted"]
    assert failure["args"]["reason"] == "enough"
    (begin, end) = [event for event in room if event["name"] == "release"]
    assert end["ts"] > begin["ts"]
    assert "args" not in end


def test_chunks_that_overlap_have_tracks_of_their_own():
    def chunk(ticket, started, at):
        return {"at": at, "event": "chunk", "room": 1, "ticket": ticket, "part": 0, "transport": "shm",
                "started": started, "bytes": {"kv": 1}, "pieces": 1, "error": ""}  # fmt: skip

    head = {"side": "prefill", "rank": "tp0/1", "instance": "i", "process": 1, "wall_offset": 0.0, "host": "h"}
    events = [
        {"at": 1.0, "event": "opened", "room": 1},
        {"at": 1.1, "event": "transferring", "room": 1, "parts": []},
        chunk(1, 1.2, 1.5),
        chunk(3, 1.5, 1.6),
        chunk(2, 1.3, 1.7),
        {"at": 2.0, "event": "ended", "room": 1, "status": "success", "error": "", "reason": ""},
        {"at": 2.0, "event": "released", "room": 1},
    ]
    checked = check_trace(trace_of([Recording(head, events)]))
    lanes = tracks_of(checked, "prefill", "room 1 chunks")
    assert sorted([event["args"]["ticket"] for event in lane if event["ph"] == "B"] for lane in lanes) == [[1, 3], [2]]
    (room,) = tracks_of(checked, "prefill", "room 1")
    assert [event["ts"] for event in room if event["name"] == "room 1"] == [0.0, 1_000_000.0]


@pytest.mark.parametrize(("hosts", "apart"), [(("a", "a"), 0.5), (("a", "b"), 10.5), (("", ""), 10.5)])
def test_ranks_of_one_machine_share_its_clock_and_others_the_time_of_day(hosts, apart):
    recordings = [
        Recording(
            {"side": side, "rank": "r", "instance": "i", "process": 1, "wall_offset": offset, "host": host},
            [{"at": at, "event": "opened", "room": 1}],
        )
        for side, host, offset, at in (("prefill", hosts[0], 100.0, 5.0), ("decode", hosts[1], 110.0, 5.5))
    ]
    checked = check_trace(trace_of(recordings))
    (begins,) = tracks_of(checked, "decode", "room 1")
    assert begins[0]["ts"] == pytest.approx(apart * 1e6)


def test_files_of_ranks_become_one_trace(world, tmp_path, monkeypatch):
    monkeypatch.setenv(TRACE_VARIABLE, str(tmp_path / "traces"))
    source, destination = pair(world)
    monkeypatch.delenv(TRACE_VARIABLE)
    hand_over(source, destination, 5)
    settle(world)
    source.manager.close()
    destination.manager.close()
    files = sorted((tmp_path / "traces").iterdir())
    assert [path.name.split("-")[0] for path in files] == ["decode", "prefill"]
    write_trace([read_recording(path) for path in files], tmp_path / "out" / "trace.json")
    checked = check_trace(json.loads((tmp_path / "out" / "trace.json").read_text()))
    for side in ("prefill", "decode"):
        assert len(tracks_of(checked, side, "room 5")) == 1


def test_a_file_that_is_cut_in_its_last_line_is_read(world, tmp_path):
    source, destination = pair(world, observers=[TraceFolder(tmp_path)])
    hand_over(source, destination)
    settle(world)
    source.manager.close()
    (path,) = tmp_path.glob("prefill-*")
    whole = read_recording(path)
    path.write_text(path.read_text()[:-20])
    assert read_recording(path).events == whole.events[:-1]


@pytest.mark.parametrize("content", ["", "[]\n", "hello\n", '{"kvbaton_trace": 99}\n', '{"kvbaton_trace": 1}\nx\ny\n'])
def test_a_file_that_is_no_recording_is_refused(tmp_path, content):
    (tmp_path / "some.jsonl").write_text(content)
    with pytest.raises(errors.ConfigurationError, match=r"some\.jsonl"):
        read_recording(tmp_path / "some.jsonl")
    with pytest.raises(errors.ConfigurationError, match="cannot be read"):
        read_recording(tmp_path / "absent.jsonl")


def test_a_folder_that_cannot_be_made_is_refused_and_a_full_one_logged(world, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.ConfigurationError, match="cannot be made"):
        TraceFolder(tmp_path / "file" / "traces")
    folder = TraceFolder(tmp_path / "traces")
    folder.folder = Path("/dev/full/nowhere")
    source, destination = pair(world, observers=[folder])
    hand_over(source, destination)
    settle(world)
    assert [record.levelno for record in caplog.records if "no trace of this rank" in record.message] == [
        logging.WARNING
    ] * 2


def test_a_timeline_is_bounded(world):
    timeline = Timeline(max_events=5)
    source, destination = pair(world, observers=[timeline])
    hand_over(source, destination)
    settle(world)
    assert [len(recording.events) for recording in timeline.recordings()] == [5, 5]
    assert timeline.dropped > 0
    check_trace(trace_of(timeline.recordings()))


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["kvbaton", "trace", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_the_command_traces_a_small_run(tmp_path, monkeypatch, capsys):
    assert run(monkeypatch, "--rooms", 4, "--output", tmp_path / "trace.json") == 0
    assert capsys.readouterr().out.startswith("3 ranks, 4 rooms: ")
    checked = check_trace(json.loads((tmp_path / "trace.json").read_text()))
    assert len({key[0] for _, _, key in checked}) == 3
    for number in range(1, 5):
        assert len(tracks_of(checked, "prefill", f"room {number}")) == 2
        assert len(tracks_of(checked, "decode", f"room {number}")) == 1
    (aborted,) = tracks_of(checked, "decode", "room 4")
    assert "failed: TransferAborted" in instants(aborted)


def test_the_command_merges_files_and_folders(world, tmp_path, monkeypatch, capsys):
    source, destination = pair(world, observers=[TraceFolder(tmp_path)])
    hand_over(source, destination, 8)
    settle(world)
    source.manager.close()
    destination.manager.close()
    for given in ([tmp_path], sorted(tmp_path.glob("*.jsonl"))):
        assert run(monkeypatch, "merge", *given, "--output", tmp_path / "trace.json") == 0
        assert capsys.readouterr().out.startswith("2 ranks, 1 rooms: ")
        check_trace(json.loads((tmp_path / "trace.json").read_text()))
    (tmp_path / "empty").mkdir()
    assert run(monkeypatch, "merge", tmp_path / "empty") == 2
    assert "no file of a rank" in capsys.readouterr().err

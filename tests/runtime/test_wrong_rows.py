"""Rows that do not fit: refused at the call where one side can tell, and a reason on both sides where not."""

import pytest
from rank_world import Model, succeeded, wait_released
from room_pairs import FULL, failed, hand_over, pair, start

import kvbaton as kb
from kvbaton import errors

BAD_OFFERS = {
    "too few pages": ({"kv": [4]}, 8, 0, None, "1 rows given for tokens 0..8"),
    "too many pages": ({"kv": [4, 5, 6]}, 8, 0, None, "3 rows given"),
    "not registered": ({"kv": [4, 99]}, 8, 0, None, "row 99 is outside the 16"),
    "negative": ({"kv": [4, -1]}, 8, 0, None, "row -1"),
    "unknown component": ({"xy": [4]}, 8, 0, None, "component xy is not registered"),
    "fractions": ({"kv": [4.0, 5.0]}, 8, 0, None, "kv: rows must be a flat list of integers, but are of type float64"),
    "nested": ({"kv": [[4, 5]]}, 8, 0, None, "flat list of integers, but are an array of 2 dimensions"),
    "ragged": ({"kv": [[4], [5, 6]]}, 8, 0, None, "flat list"),
    "prefix": ({"kv": []}, 8, 9, None, "prefix of 9"),
    "aux slot": ({"kv": [4, 5]}, 8, 0, 77, "row 77"),
    "start": ({"kv": kb.Pages([4, 5], 3)}, 8, 0, None, "multiple"),
}


class TestWrongRows:
    @pytest.mark.parametrize("name", BAD_OFFERS)
    def test_an_offer_raises_and_may_be_made_again(self, world, name):
        rows, tokens, prefix, aux, words = BAD_OFFERS[name]
        source, destination = pair(world, FULL)
        source.fill("conv", [1])
        source.fill("aux", [1])
        sender, receiver = source.manager.sender(0), destination.manager.receiver(0)
        with pytest.raises(errors.RowsError, match=words):
            receiver.offer(rows, tokens, prefix, aux)
        with pytest.raises(errors.RowsError):
            sender.send(rows if rows != {"kv": []} else {"kv": [1]}, (0, tokens)) if aux is None else sender.finish(
                {"kv": [0, 1]}, (0, 8), aux=aux
            )
        receiver.offer({"kv": [4, 5], "conv": [2]}, 8, aux=2)
        sender.finish({"kv": [0, 1], "conv": [1]}, (0, 8), aux=1)
        succeeded(sender, receiver)
        destination.check("kv", [4, 5], (0, 8))
        destination.check("conv", [2])
        destination.check("aux", [2])
        destination.check_rest()

    @pytest.mark.parametrize(
        ("rows", "words"),
        [
            ({"kv": [4, 4], "conv": [2]}, "component kv: row 4 is offered for two places"),
            ({"kv": [4, 5], "conv": [2, 2]}, "component conv: row 2 is offered for two places"),
            ({"kv": kb.Pages([9, 5, 9], 0), "conv": [2]}, "component kv: row 9 is offered for two places"),
            ({"kv": [4, 5], "conv": [2], "aux": [1]}, "component aux is aux data: pass its row as aux="),
        ],
    )
    def test_a_row_that_would_be_written_twice(self, world, rows, words):
        _, destination = pair(world, FULL)
        receiver = destination.manager.receiver(0)
        with pytest.raises(errors.RowsError, match=words):
            receiver.offer(rows, 12 if isinstance(rows["kv"], kb.Pages) else 8, 0, 2)

    def test_rows_that_stand_for_nothing_may_come_twice(self, world):
        """Out of the window, some engines name one row that holds nothing."""
        model = Model(("window",), window=6)
        (source,), (destination,) = world.prefill(model.layout()), world.decode(model.layout())
        source.fill("window", [1, 2], (12, 19), start=12)
        sender, receiver = source.manager.sender(0), destination.manager.receiver(0)
        receiver.offer({"window": kb.Pages([0, 0, 0, 4, 5], 0)}, 19)
        sender.finish({"window": kb.Pages([0, 0, 0, 1, 2], 0)}, (0, 19))
        succeeded(sender, receiver)
        destination.check("window", [4, 5], (13, 19), start=12)
        destination.check_rest()

    def test_a_chunk_that_was_refused_does_not_count(self, world):
        source, destination = pair(world)
        sender, receiver = start(source, destination)
        with pytest.raises(errors.RowsError, match=r"1 rows given for tokens 0\.\.400"):
            sender.send({"kv": [0]}, (0, 400))
        with pytest.raises(errors.RowsError, match="no range"):
            sender.send({"kv": [0]}, (8, 4))
        sender.send({"kv": [0, 1]}, (0, 8))
        sender.finish()
        succeeded(sender, receiver)

    def test_an_aux_slot_without_aux_component(self, world):
        source, destination = pair(world)
        with pytest.raises(errors.RowsError, match="no component of kind aux"):
            destination.manager.receiver(0).offer({"kv": [4, 5]}, 8, aux=0)
        with pytest.raises(errors.RowsError, match="no component of kind aux"):
            source.manager.sender(0).finish({"kv": [0, 1]}, (0, 8), aux=0)

    def test_state_belongs_to_finish(self, world):
        source, _ = pair(world, FULL)
        with pytest.raises(errors.RowsError, match="conv"):
            source.manager.sender(0).send({"kv": [0], "conv": [1]}, (0, 4))

    def test_rows_in_the_middle_that_are_missing(self, world):
        source, destination = pair(world)
        sender, receiver = start(source, destination)
        sender.send({"kv": [0]}, (0, 3))
        sender.finish({"kv": [1]}, (5, 8))
        failed(sender, "kv", "from 3 on")
        failed(receiver, "kv", "from 3 on")
        wait_released(sender, receiver)

    @pytest.mark.parametrize("first", ["offer", "finish"])
    def test_tokens_differ(self, world, first):
        source, destination = pair(world)
        sender, receiver = source.manager.sender(0), destination.manager.receiver(0)
        calls = [lambda: sender.finish({"kv": [0, 1]}, (0, 7)), lambda: receiver.offer({"kv": [4, 5]}, 8)]
        for call in calls if first == "finish" else reversed(calls):
            call()
        failed(sender, "7 tokens", "8")
        failed(receiver, "7 tokens", "8")
        wait_released(sender, receiver)
        hand_over(source, destination, 1)

    @pytest.mark.parametrize(
        ("sent", "offered"), [({}, {"conv": [1]}), ({"conv": [0]}, {}), ({"conv": [0, 1]}, {"conv": [2]})]
    )
    def test_slots_differ(self, world, sent, offered):
        source, destination = pair(world, Model(("kv", "conv")))
        sender, receiver = source.manager.sender(0), destination.manager.receiver(0)
        receiver.offer({"kv": [4, 5], **offered}, 8)
        sender.finish({"kv": [0, 1], **sent}, (0, 8))
        failed(sender, "conv")
        failed(receiver, "conv")
        wait_released(sender, receiver)

    def test_aux_at_decode_only(self, world):
        source, destination = pair(world, Model(("kv", "aux")))
        sender, receiver = source.manager.sender(0), destination.manager.receiver(0)
        receiver.offer({"kv": [4, 5]}, 8, aux=1)
        sender.finish({"kv": [0, 1]}, (0, 8))
        failed(sender, "aux")
        failed(receiver, "aux")

    def test_aux_at_prefill_only_is_not_asked_for(self, world):
        source, destination = pair(world, Model(("kv", "aux")))
        sender, receiver = source.manager.sender(0), destination.manager.receiver(0)
        source.fill("aux", [1])
        receiver.offer({"kv": [4, 5]}, 8)
        sender.finish({"kv": [0, 1]}, (0, 8), aux=1)
        succeeded(sender, receiver)
        destination.check("kv", [4, 5], (0, 8))
        destination.check_rest()

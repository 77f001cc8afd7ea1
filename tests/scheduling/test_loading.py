"""Requests whose prefix lies on disk: others go on meanwhile, and loading ends like any other phase."""

from __future__ import annotations

import pytest

from bough.errors import ShuttingDown, TimedOut
from bough.scheduling.admission import MIN_SHARED_TOKENS
from tests.fakes import MODELS
from tests.scenarios.world import clear_idle_lanes
from tests.scheduling.concert import Client, Concert
from tests.scheduling.test_scheduler import prompt

KNOWN = prompt(7, 200)

every_model = pytest.mark.parametrize("model", MODELS)


def on_disk(model: str = "full", known: list[int] = KNOWN, **options: object) -> Concert:
    """A concert that has a prompt on a slow disk, and nowhere else."""
    concert = Concert(model, has_disk=True, **options)  # type: ignore[arg-type]
    assert concert.disk is not None
    concert.ask(known)
    concert.play()
    concert.disk.work()
    clear_idle_lanes(concert.cache)
    while concert.cache.residency.evictor.evict_one():
        pass
    concert.engine.evaluated.clear()
    concert.disk.reader.is_slow = True
    concert.cache.residency.loader.clock = lambda: 0.0  # no disk is too slow
    return concert


def read(concert: Concert, number: int = 1000) -> None:
    assert concert.disk is not None
    while number and concert.disk.reader.finish(0):
        number -= 1


def loading(concert: Concert) -> int:
    return sum(job.is_loading for job in concert.scheduler.running)


@every_model
def test_words_keep_coming_while_another_request_loads(model: str) -> None:
    concert = on_disk(model)
    talker = concert.ask(prompt(1, 8), max_tokens=100)
    while not talker.tokens:
        concert.turn()
    reader = concert.ask([*KNOWN, 1])
    for expected in range(2, 10):
        concert.turn()
        assert (len(talker.tokens), reader.tokens, loading(concert)) == (expected, [], 1)

    read(concert)
    concert.play()

    assert reader.tokens == concert.alone([*KNOWN, 1])
    assert reader.completion is not None and reader.completion.usage.cached_tokens >= len(KNOWN) - 1
    assert reader.completion.timings.loading.disk_bytes > 0


def test_a_request_that_loads_has_begun_and_tells_how_far_it_has_come() -> None:
    concert = on_disk()
    seen: list[tuple[int, int]] = []
    client = concert.ask([*KNOWN, 1], on_progress=lambda done, total: seen.append((done, total)))
    concert.turn()
    assert client.started is not None and client.started.cached_tokens == len(KNOWN) and seen == [(0, 201)]
    for _ in range(3):
        read(concert, 1)
        concert.turn()
    assert seen == [(0, 201), (16, 201), (32, 201), (48, 201)]
    assert client.loaded is None


@every_model
def test_when_a_request_has_loaded_its_listener_hears_how_much_it_really_reuses(model: str) -> None:
    concert = on_disk(model)
    given_up, whole = concert.ask([*KNOWN, 1]), concert.ask([*KNOWN, 2])
    concert.turn()
    planned = given_up.started
    assert planned is not None and given_up.loaded is None

    concert.cache.residency.loader.clock = lambda: 100.0  # the disk is too slow by now
    for _ in range(2):  # they take turns
        concert.turn()
    assert given_up.loaded is not None and given_up.loaded.cached_tokens < planned.cached_tokens
    concert.play()

    for client in (given_up, whole):
        assert client.loaded is not None and client.completion is not None
        usage = client.completion.usage
        assert (usage.cached_tokens, usage.matched_tokens) == (client.loaded.cached_tokens, client.loaded.matched_tokens)
        assert usage.cached_tokens + usage.computed_tokens == usage.prompt_tokens


def test_a_request_that_reads_nothing_from_disk_does_not_hear_of_loading() -> None:
    concert = Concert()
    client = concert.ask(KNOWN)
    concert.play()
    assert client.loaded is None


def test_at_most_half_of_the_lanes_load_and_others_pass_those_who_wait_for_it() -> None:
    concert = on_disk(lanes=4)
    readers = [concert.ask([*KNOWN, token]) for token in range(3)]
    concert.turn()
    assert loading(concert) == 2 and len(concert.scheduler.waiting) == 1

    quick = concert.ask(prompt(3, 20))
    while not quick.is_done:
        concert.turn()
    assert loading(concert) == 2 and not any(client.is_done for client in readers)

    read(concert)
    concert.play()
    assert all(client.tokens == concert.alone([*KNOWN, token]) for token, client in enumerate(readers))


def test_with_one_lane_a_request_may_load_too() -> None:
    concert = on_disk(lanes=1)
    client = concert.ask([*KNOWN, 1])
    concert.turn()
    assert loading(concert) == 1 and concert.scheduler.is_only_loading
    read(concert)
    concert.play()
    assert client.tokens == concert.alone([*KNOWN, 1])


def test_a_request_that_loads_leads_others_through_what_it_computes_afterwards() -> None:
    concert = on_disk()
    shared = [*KNOWN, *prompt(9, MIN_SHARED_TOKENS + 40)]
    leader, follower = concert.ask([*shared, 1]), concert.ask([*shared, 2])
    concert.turn()
    assert loading(concert) == 1 and len(concert.scheduler.waiting) == 1

    read(concert)
    concert.play()

    assert leader.completion is not None and leader.completion.usage.cached_tokens == len(KNOWN)
    assert follower.completion is not None and follower.completion.usage.cached_tokens >= len(shared) - 16
    assert sum(concert.engine.evaluated) < len(shared) + 100


@pytest.mark.parametrize("ending", ["gone", "late", "shut down"])
@every_model
def test_a_request_that_loads_ends_like_any_other(model: str, ending: str) -> None:
    concert = on_disk(model)
    client = concert.ask([*KNOWN, 1], deadline_s=concert.clock() + 0.5 if ending == "late" else float("inf"))
    concert.turn()
    read(concert, 1 if len(concert.engine.groups) > 1 else 0)
    concert.turn()
    assert loading(concert) == 1

    client.is_gone = ending == "gone"
    if ending == "shut down":
        concert.scheduler.fail_all(ShuttingDown("the end"))
    for _ in range(60):
        if client.is_done:
            break
        concert.turn()

    assert _is_ended(client, ending) and client.loaded is None
    if client.completion is not None:  # what was planned did not happen
        assert (client.completion.usage.cached_tokens, client.completion.usage.computed_tokens) == (0, 0)
    assert not concert.scheduler.running and not concert.cache.forest.holds
    assert not any(concert.cache.memory.reserved_bytes.values())
    assert concert.disk is not None and concert.disk.reader.num_reads == 0


def _is_ended(client: Client, ending: str) -> bool:
    if ending == "gone":
        return client.completion is not None and client.completion.finish_reason == "cancelled"
    return isinstance(client.error, TimedOut if ending == "late" else ShuttingDown)


def test_a_lane_that_cannot_adopt_what_was_read_fails_that_request_alone() -> None:
    concert = on_disk()
    talker = concert.ask(prompt(1, 8), max_tokens=20)
    client = concert.ask([*KNOWN, 1])
    concert.turn()
    read(concert)
    concert.engine.fail_next = "adopt"
    concert.play()
    assert client.error is not None and talker.completion is not None
    assert not any(concert.cache.memory.reserved_bytes.values())


def test_nobody_waits_for_a_leader_that_will_stand_beyond_what_they_share() -> None:
    """The leader is planned to stand at its own restore point: it computes nothing that the other could use."""
    concert = on_disk("full+recurrent", known=prompt(7, 900))
    leader = concert.ask([*prompt(7, 900), 1])
    concert.turn()
    follower = concert.ask([*prompt(7, 600), 2])
    for _ in range(3):
        concert.turn()
    assert leader.started is not None and loading(concert) == 1
    assert follower.started is not None  # it computes for itself


def test_requests_that_must_wait_to_load_are_looked_up_once() -> None:
    concert = on_disk(lanes=4)
    for token in range(12):
        concert.ask([*KNOWN, token])
    concert.turn()
    calls, needs_loading = [], concert.cache.needs_loading

    def counted(ids: bytes, salt: str = "") -> bool:
        calls.append(salt)
        return needs_loading(ids, salt)

    concert.cache.needs_loading = counted  # type: ignore[method-assign, assignment]
    for _ in range(5):
        concert.turn()
    assert loading(concert) == 2 and not calls
    read(concert)
    concert.play()
    assert all(client.completion for client in concert.clients)

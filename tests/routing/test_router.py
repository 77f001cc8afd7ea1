"""The router: leaders and followers, salts, restarts, requests that never report, and any sequence of these."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from bough.cache.disk.keys import PageKeys
from bough.cache.tree.state import Tier
from bough.routing.page_reports import Outbox, PageMessage, PageNote
from bough.routing.rates import ReplicaRates
from bough.routing.router import LOST_S, SETTLING_S, Router, RoutingRequest
from bough.tokens import pack

PAGE = 256
DEVICE = PageNote(Tier.DEVICE)
RATES = ReplicaRates({0: 1e-4}, {Tier.DISK: 1e-9}, 1000)
KEYS = PageKeys(b"the secret of one whole cluster!", "a model", PAGE)


def ask(tokens: list[int], salt: str = "") -> RoutingRequest:
    return RoutingRequest(len(tokens), KEYS.digests(KEYS.root(salt), pack(tokens))[1:])


def router_of(*names: str) -> Router:
    router = Router(PAGE)
    for name in names:
        router.add(name, RATES)
        router.apply(PageMessage(name, 1, 0, {}, is_listing=True))
    return router


SYSTEM = list(range(1024))


def test_followers_join_their_leader_until_its_queue_costs_more_than_computing_again() -> None:
    router = router_of(*"abcd")
    tails = [[*range(number, number + 200)] for number in range(5000, 9000, 200)]  # each takes 0.02 s
    sent = [router.route(ask([*SYSTEM, *tail]), now=0.0, uniform=0.99).replica for tail in tails]
    assert sent[:2] == ["d"] * 2
    assert len(set(sent)) > 1  # the queue was longer than computing the 0.1 s of the prefix takes
    assert max(router.queue(name).waiting_s(0.0) for name in "abcd") < 0.1224 + 2 * 0.1024 + 0.02
    router.check()


def test_a_request_for_an_equal_prefix_is_predicted_to_compute_its_own_tail_only() -> None:
    router = router_of("a", "b")
    leader = router.route(ask([*SYSTEM, 1]), 0.0, 0.0)
    follower = router.route(ask([*SYSTEM, 2]), 0.0, 0.0)
    best = follower.best
    assert (leader.replica, best.replica, best.depth) == ("a", "a", 1024)
    assert best.waiting_s == pytest.approx(1025e-4)
    assert best.compute_s == pytest.approx(1e-4)
    assert follower.best.copy is None


def test_a_prefix_that_is_being_copied_is_coming_and_not_copied_again() -> None:
    router = Router(PAGE)
    for name in "ab":
        router.add(name, ReplicaRates(RATES.token_s, {Tier.STORE: 1e-9}, 1000, PAGE))
        router.apply(
            PageMessage(name, 1, 0, dict.fromkeys(ask(SYSTEM).digests, DEVICE) if name == "a" else {}, is_listing=True)
        )
    chosen = [router.route(ask([*SYSTEM, *range(number, number + 200)]), 0.0, 0.0) for number in range(2000, 5000, 200)]
    copies = [each.best.copy for each in chosen]
    assert {each.replica for each in chosen} == {"a", "b"}
    assert [copy.source for copy in copies if copy] == ["a"]
    router.check()


def test_nothing_is_copied_between_replicas_of_different_fingerprints() -> None:
    router = Router(PAGE)
    for name, mark in (("a", "transformers 5.22"), ("b", "transformers 5.23")):
        router.add(name, ReplicaRates(RATES.token_s, {Tier.STORE: 1e-9}, 1000, PAGE, mark))
        router.apply(
            PageMessage(name, 1, 0, dict.fromkeys(ask(SYSTEM).digests, DEVICE) if name == "a" else {}, is_listing=True)
        )
    chosen = [router.route(ask([*SYSTEM, *range(number, number + 200)]), 0.0, 0.0) for number in range(2000, 5000, 200)]
    assert {each.replica for each in chosen} == {"a", "b"}
    assert not [each.best.copy for each in chosen if each.best.copy]


def test_prefixes_of_other_salts_are_strangers() -> None:
    router = router_of("a", "b")
    router.route(ask([*SYSTEM, 1], salt="x"), 0.0, 0.0)
    best = [router.route(ask([*SYSTEM, 1], salt="y"), 0.0, 0.0, [name]).best for name in "ab"]
    assert all(each.depth == 0 for each in best)
    router.apply(PageMessage("b", 1, 1, dict.fromkeys(ask(SYSTEM, salt="x").digests, DEVICE)))
    assert router.route(ask(SYSTEM, salt="x"), 0.0, 0.99).best.depth == 1023
    assert not any(router.route(ask(SYSTEM), 0.0, 0.0, [name]).best.depth for name in "ab")


def test_prefixes_shorter_than_a_page_have_no_leader() -> None:
    router = router_of("a", "b")
    router.route(ask(SYSTEM[:255]), 0.0, 0.0)
    assert router.route(ask(SYSTEM[:255]), 0.0, 0.0).replica == "b"  # b has no queue, and a has nothing to offer


def test_work_is_counted_until_the_first_token_and_pages_come_a_moment_longer() -> None:
    router = router_of("a")
    leader = router.route(ask([*SYSTEM, 1]), 0.0, 0.0)
    assert router.queue("a").waiting_s(0.0) == pytest.approx(0.1025)
    assert router.queue("a").waiting_s(0.05) == pytest.approx(0.1025 - 0.05)
    assert router.queue("a").waiting_s(9.0) == 0.0  # not less than nothing
    router.done(leader.ticket, 0.2)
    router.done(leader.ticket, 0.2)
    assert router.queue("a").waiting_s(0.2) == 0.0
    assert router.route(ask([*SYSTEM, 2]), 0.2, 0.0).best.depth == 1024
    assert router.route(ask([*SYSTEM, 2]), 0.2 + SETTLING_S, 0.0).best.depth == 0
    router.check()


def test_a_request_that_never_reports_is_forgotten() -> None:
    router = router_of("a")
    router.route(ask([*SYSTEM, 1]), 0.0, 0.0)
    router.route(ask([1]), LOST_S + 1, 0.0)
    router.check()
    assert router.queue("a").waiting_s(LOST_S + 1) == pytest.approx(1e-4)


def test_a_delay_that_a_replica_reports_counts() -> None:
    router = router_of("a", "b")
    router.note_delay("a", 1.0)
    assert Counter(router.route(ask([1]), 0.0, step / 8).replica for step in range(8)) == {"b": 8}


def test_only_the_given_replicas_are_candidates() -> None:
    router = router_of("a", "b", "c")
    assert router.route(ask(SYSTEM), 0.0, 0.0, ["c"]).replica == "c"


@pytest.mark.parametrize("seed", range(6))
def test_the_books_are_right_after_any_sequence_of_events(seed: int) -> None:
    chance = random.Random(seed)
    router, outboxes, incarnation = router_of("a", "b"), dict[str, Outbox](), 1
    prompts = [
        [first] * PAGE + [second] * PAGE + [third] * PAGE for first in (1, 2) for second in (1, 2) for third in (1, 2)
    ]
    tickets: list[int] = []
    for step in range(400):
        now, what, name = step / 20, chance.random(), chance.choice("abcd")
        request = ask([*chance.choice(prompts)[: chance.randrange(1, 3 * PAGE)], 7], salt=chance.choice("xy"))
        if what < 0.5:
            tickets.append(router.route(request, now, chance.random()).ticket)
        elif what < 0.7 and tickets:
            router.done(tickets.pop(chance.randrange(len(tickets))), now)
        elif what < 0.85 and name in outboxes:
            for digest in request.digests:
                outboxes[name].note(digest, chance.choice([None, DEVICE]), now)
            router.apply(chance.choice([outboxes[name].take, outboxes[name].list_all])())
        elif what < 0.93:
            router.add(name, chance.choice([None, RATES]))
            incarnation += 1
            outboxes[name] = Outbox(name, incarnation)
        elif name in "cd":  # a and b stay
            router.remove(name)
            outboxes.pop(name, None)
        router.check()

"""Requests under way: their ids, who follows them, and what stays of them."""

from __future__ import annotations

from bough.server.serving.loaded.progress import (
    MOST_ENDED,
    MOST_SALTS,
    FollowedRequests,
    LiveRequests,
    RequestProgress,
    RequestRecord,
)
from bough.types import Usage


def begin(requests: LiveRequests, request_id: str = "a", salt: str = "", model: str = "m") -> RequestProgress:
    return requests.begin(request_id, model, salt, now=0.0)


def end(requests: LiveRequests, *progresses: RequestProgress) -> None:
    for each in progresses:
        record = RequestRecord(each.model, Usage(prompt_tokens=10, cached_tokens=6, computed_tokens=4), completion_tokens=3)
        requests.end(each, record, is_complete=True)


def test_running_requests_of_one_salt_never_share_an_id() -> None:
    requests = LiveRequests()

    first, second, third = begin(requests), begin(requests), begin(requests)
    other = begin(requests, salt="other")
    end(requests, second)
    fourth = begin(requests)

    assert [each.request_id for each in (first, second, third, fourth)] == ["a", "a#2", "a#3", "a#2"]
    assert other.request_id == "a"  # a client learns nothing of the ids of others


def test_who_follows_a_model_hears_of_its_requests_alone_and_takes_each_end_once() -> None:
    requests, followed = LiveRequests(), FollowedRequests("m")
    before = begin(requests)
    with requests.follow(followed):
        assert not followed.wakes.is_set()
        mine, other = begin(requests), begin(requests, model="other")
        assert followed.wakes.is_set()
        end(requests, before, other)
        assert followed.take_ended() == [before]
        end(requests, mine)
    assert followed.take_ended() == [mine]
    assert followed.take_ended() == []
    assert requests.running("m") == requests.running("other") == []


def test_a_request_that_has_ended_is_kept_for_nobody_but_who_follows_it() -> None:
    requests, followed = LiveRequests(), FollowedRequests("m")
    end(requests, begin(requests))
    with requests.follow(followed):
        for number in range(MOST_ENDED + 5):
            end(requests, begin(requests, str(number)))
    end(requests, begin(requests))

    ended = followed.take_ended()

    assert [each.request_id for each in ended] == [str(number) for number in range(5, MOST_ENDED + 5)]
    assert all(each.request is None for each in ended)


def test_totals_are_counted_by_model_and_salt_and_bounded() -> None:
    requests = LiveRequests()
    for number in range(MOST_SALTS):
        end(requests, begin(requests, salt=f"salt {number}"))

    assert requests.totals("m", None).requests == MOST_SALTS
    assert requests.totals("m", None).cached_tokens == 6 * MOST_SALTS
    assert requests.totals("m", f"salt {MOST_SALTS - 1}").completion_tokens == 3
    assert requests.totals("m", "salt 0").requests == 0  # forgotten

"""Every error that Bough raises on purpose, in one tree.

    BoughError
    ├── SettingsError            a setting that cannot be read or makes no sense
    ├── RequestError             the request cannot be served as it stands; nothing was changed
    │   ├── PromptTooLong        more tokens than the model's context
    │   ├── DoesNotFit           more memory than the budget can ever give, or can give now
    │   └── TooLarge             more bytes than may be sent
    ├── Unavailable              this cannot be done now; the same request may do well later
    │   ├── LanesBusy            every lane serves another request; try again when one ends
    │   ├── QueueFull            as many requests wait as may wait
    │   ├── NoRoom               a model cannot be loaded beside those that are in use
    │   ├── ShuttingDown         the server ends, and takes nothing new
    │   ├── TimedOut             a request took longer than it may
    │   ├── EngineStuck          one step of the engine takes longer than any may
    │   └── RateLimited          a client asks more often than it may
    ├── RequestCancelled         whoever asked has gone; nothing more is done for the request
    ├── AccessDenied             no key or a wrong one, or a page from elsewhere that asks in the user's name
    ├── ModelError               a model cannot be found, fetched, read or run
    │   ├── ModelNotFound
    │   ├── DownloadError
    │   └── UnsupportedModel
    └── EngineError              the engine failed in the middle of a forward pass

Foreign errors are translated where they enter (downloads, model loading, engine steps), never passed through.
"""

from __future__ import annotations


class BoughError(Exception):
    """The root of the tree: catch this to catch everything that Bough raises on purpose."""


class SettingsError(BoughError):
    """A setting that cannot be read, has an unknown name or a value outside its range."""


class RequestError(BoughError):
    """The request cannot be served as it stands."""


class PromptTooLong(RequestError):
    """The prompt has more tokens than the model's context can hold.

    `prompt_tokens` is their number, or with `is_least` a number that it is not below: the rest was not counted.
    """

    def __init__(self, prompt_tokens: int, context_tokens: int, *, is_least: bool = False) -> None:
        number = f"at least {prompt_tokens}" if is_least else prompt_tokens
        super().__init__(f"the prompt has {number} tokens, and the context holds {context_tokens}")
        self.prompt_tokens = prompt_tokens
        self.context_tokens = context_tokens
        self.is_least = is_least


class DoesNotFit(RequestError):
    """The request needs more memory than the budget allows.

    `can_wait` tells whether it would fit once the requests that run now have ended.
    """

    def __init__(self, needed_bytes: int, budget_bytes: int, busy_bytes: int) -> None:
        super().__init__(
            f"the request needs {needed_bytes:,} bytes, and the budget is {budget_bytes:,} bytes, "
            f"of which running requests hold {busy_bytes:,}"
        )
        self.needed_bytes = needed_bytes
        self.budget_bytes = budget_bytes
        self.busy_bytes = busy_bytes

    @property
    def can_wait(self) -> bool:
        return self.needed_bytes <= self.budget_bytes


class TooLarge(RequestError):
    """More was sent than may be."""

    def __init__(self, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"the body has {size_bytes:,} bytes or more, and may have {limit_bytes:,}")
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes


class Unavailable(BoughError):
    """This cannot be done now; the same request may do well after `retry_after_s`."""

    retry_after_s = 1.0


class LanesBusy(Unavailable):
    """Every lane serves another request."""

    def __init__(self, num_lanes: int) -> None:
        super().__init__(f"all {num_lanes} lanes are busy; wait for a request to end or raise the setting `lanes`")
        self.num_lanes = num_lanes


class QueueFull(Unavailable):
    """As many requests wait for a lane as may wait."""

    def __init__(self, num_waiting: int) -> None:
        super().__init__(f"{num_waiting} requests are waiting already, and no more may wait; try again soon")
        self.num_waiting = num_waiting


class NoRoom(Unavailable):
    """A model cannot be loaded beside those that are in use."""

    retry_after_s = 5.0


class ShuttingDown(Unavailable):
    """The server or the model is ending and takes nothing new."""

    retry_after_s = 5.0


class TimedOut(Unavailable):
    """A request waited or ran longer than it may. The work that was done is kept: asking again goes on from there."""


class EngineStuck(Unavailable):
    """One step of the engine takes longer than any may; its requests have been given up."""

    retry_after_s = 30.0


class RateLimited(Unavailable):
    """A client asks more often than it may."""

    def __init__(self, text: str, retry_after_s: float) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class RequestCancelled(BoughError):
    """Whoever asked has gone, and nothing more is done for the request."""


class AccessDenied(BoughError):
    """No key, a wrong one, or a web page from elsewhere. `needs_key` tells whether a key would help."""

    def __init__(self, text: str, *, needs_key: bool = True) -> None:
        super().__init__(text)
        self.needs_key = needs_key


class ModelError(BoughError):
    """A model cannot be found, fetched, read or run."""


class ModelNotFound(ModelError):
    """No local model, no folder, no file and no known name matches."""


class DownloadError(ModelError):
    """A download failed, arrived damaged, or there is no network."""


class UnsupportedModel(ModelError):
    """The files are there, but no engine can run what they describe."""


class EngineError(BoughError):
    """The engine failed in the middle of a forward pass; the lane's groups may disagree."""

"""Every error that Bough raises on purpose, in one tree.

    BoughError
    ├── SettingsError            a setting that cannot be read or is out of range
    ├── RequestError             the request is wrong; nothing was changed
    │   ├── PromptTooLong        more tokens than the model's context
    │   ├── DoesNotFit           the request needs more memory than the budget has
    │   ├── NodeNotFound         the tree has no such node, or no longer
    │   ├── TemplateLimit        the chat template takes too much time or memory
    │   └── TooLarge             the body has too many bytes
    ├── Unavailable              this cannot be done now; the same request may succeed later
    │   ├── LanesBusy            every lane serves another request
    │   ├── QueueFull            the queue has its largest number of requests
    │   ├── NoRoom               there is no memory to load a model beside those in use
    │   ├── ShuttingDown         the server or the model is ending
    │   ├── TimedOut             a request took longer than its limit
    │   ├── EngineStuck          one step of the engine takes longer than the limit
    │   └── RateLimited          a client sends more requests than its limit
    ├── RequestCancelled         the client has gone
    ├── AccessDenied             no key, a wrong key, or a web page of another origin
    ├── ModelError               a model cannot be found, fetched, read or run
    │   ├── ModelNotFound
    │   ├── DownloadError
    │   └── UnsupportedModel
    ├── KernelsMissing           there are no kernels for this CPU, or they cannot be used
    └── EngineError              the engine failed in the middle of a forward pass

Errors of libraries are translated where they enter (downloads, model loading, engine steps), and never passed on.
"""

from __future__ import annotations

from typing import Any


class BoughError(Exception):
    """The root of the tree. Catch it to catch everything that Bough raises on purpose. Each can be pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


class SettingsError(BoughError):
    """A setting cannot be read, has an unknown name, or a value out of range."""


class RequestError(BoughError):
    """The request is wrong, and the same request will fail again."""


class PromptTooLong(RequestError):
    """The prompt has more tokens than the model's context can hold.

    `prompt_tokens` is the number of tokens, or with `is_least` a lower bound of it.
    """

    def __init__(self, prompt_tokens: int, context_tokens: int, *, is_least: bool = False) -> None:
        number = f"at least {prompt_tokens}" if is_least else prompt_tokens
        super().__init__(f"the prompt has {number} tokens, and the context holds {context_tokens}")
        self.prompt_tokens = prompt_tokens
        self.context_tokens = context_tokens
        self.is_least = is_least


class DoesNotFit(RequestError):
    """The request needs more memory than the budget allows.

    `can_wait` says whether the request fits when the running requests have ended.
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


class NodeNotFound(RequestError):
    """The tree has no such node, or it has gone meanwhile."""


class TemplateLimit(RequestError):
    """The chat template takes more time or memory than a rendering may."""


class TooLarge(RequestError):
    """The body of a request is larger than the limit."""

    def __init__(self, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"the body has {size_bytes:,} bytes or more, and may have {limit_bytes:,}")
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes


class Unavailable(BoughError):
    """This cannot be done now. The same request may succeed after `retry_after_s`."""

    retry_after_s = 1.0


class LanesBusy(Unavailable):
    """Every lane serves another request."""

    def __init__(self, num_lanes: int) -> None:
        super().__init__(f"all {num_lanes} lanes are busy; wait for a request to end or raise the setting `lanes`")
        self.num_lanes = num_lanes


class QueueFull(Unavailable):
    """The queue has its largest number of requests."""

    def __init__(self, num_waiting: int) -> None:
        super().__init__(f"{num_waiting} requests are waiting already, and no more may wait; try again soon")
        self.num_waiting = num_waiting


class NoRoom(Unavailable):
    """There is no memory to load a model beside those in use."""

    retry_after_s = 5.0


class ShuttingDown(Unavailable):
    """The server or the model is ending, and takes no new requests."""

    retry_after_s = 5.0


class TimedOut(Unavailable):
    """A request took longer than its limit. The work that was done is kept, and a new request continues from it."""


class EngineStuck(Unavailable):
    """One step of the engine takes longer than the limit. Its requests have failed."""

    retry_after_s = 30.0


class RateLimited(Unavailable):
    """A client sends more requests than its limit."""

    def __init__(self, text: str, retry_after_s: float) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class RequestCancelled(BoughError):
    """The client has gone, and nothing more is done for the request."""


class AccessDenied(BoughError):
    """No key, a wrong key, or a web page of another origin. `needs_key` says whether a key would help."""

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
    """No engine can run the model that the files describe."""


class KernelsMissing(BoughError):
    """There are no kernels for this CPU, or they cannot be used. Models run without them; `todo` says how to get them."""

    def __init__(self, reason: str, todo: str) -> None:
        super().__init__(f"{reason}; {todo}" if todo else reason)
        self.reason = reason
        self.todo = todo


class EngineError(BoughError):
    """The engine failed in the middle of a forward pass. The groups of the lane may be at different offsets."""


def _rebuild(kind: type[BoughError], args: tuple[Any, ...], state: dict[str, Any]) -> BoughError:
    """An error as it was when it was pickled. Its text is made already, so it is not constructed again."""
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error

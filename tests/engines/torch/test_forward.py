"""What the head of a model reads is kept for one call, in one thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from bough.engines.torch.forward import TorchForward
from bough.errors import EngineError
from tests.tiny_models import make_model

IDS, OTHER_IDS = [5, 6, 7, 8], [40, 41, 42]


def test_only_the_thread_that_watches_the_head_sees_its_input() -> None:
    """Graphs are captured on a thread of their own, with the same modules."""
    model = make_model("llama")
    forward = TorchForward(model)

    with forward.watching_head() as seen:
        forward.all_logits(forward.tensor_of(IDS), [0])
        with ThreadPoolExecutor(1) as pool:
            pool.submit(forward.all_logits, forward.tensor_of(OTHER_IDS), [0]).result()

    with torch.inference_mode():
        wanted = model.base_model(input_ids=torch.tensor([IDS])).last_hidden_state[0, -1]
    assert torch.allclose(seen.last, wanted, rtol=1e-5, atol=1e-6)


def test_a_head_that_was_watched_is_left_as_it_was() -> None:
    model = make_model("llama")
    forward = TorchForward(model)

    with pytest.raises(ZeroDivisionError), forward.watching_head():
        raise ZeroDivisionError

    assert not model.lm_head._forward_pre_hooks


def test_a_head_that_is_not_called_is_told() -> None:
    forward = TorchForward(make_model("llama"))

    with forward.watching_head() as seen:
        pass

    with pytest.raises(EngineError, match="did not call its head"):
        _ = seen.last

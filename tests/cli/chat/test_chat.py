"""The interactive chat, with messages from a list instead of a keyboard."""

from __future__ import annotations

import signal
import threading

import pytest

from bough.cli.backends.local import LocalBackend
from bough.cli.chat.chat import TerminalChat
from bough.cli.chat.line_editor import MessageDropped, read_message
from bough.cli.chat.loop import run_chat
from bough.cli.chat.sessions import FIRST, ChatSession, Conversation, Exchange, Sessions
from bough.cli.terminal.screen import Screen
from bough.errors import EngineError, RequestError
from bough.scheduling.scheduler import Scheduler
from tests.cli.conftest import make_runner
from tests.fakes import FakeEngine
from tests.models.tiny_tokenizer import byte_level
from tests.waiting import BOUND_S, wait_until

SHORT = {"max_tokens": 5}
CTRL_C, DROPPED = "\x03", "half a message\x03"


def talk(runner, *messages: str, given=SHORT, system: str = "", screen: Screen | None = None, **options) -> TerminalChat:
    """A chat that has heard these messages and then the end of the input."""
    coming = iter(messages)

    def read() -> str:
        try:
            return raising_ctrl_c(next(coming))
        except StopIteration:
            raise EOFError from None

    session = ChatSession(given=dict(given), branches={FIRST: Conversation(system)})
    chat = TerminalChat(LocalBackend(runner), screen or Screen(), session=session, **options)
    run_chat(chat, read)
    return chat


def raising_ctrl_c(line: str) -> str:
    if line == CTRL_C:
        raise KeyboardInterrupt
    if line == DROPPED:
        raise MessageDropped
    return line


def questions(chat: TerminalChat) -> list[str]:
    return [each.question for each in chat.conversation.exchanges]


def test_a_message_is_answered_with_what_was_said_before(runner, tmp_path, capsys):
    chat = talk(runner, "Hello", "How are you?", system="Be brief.")

    first, second = chat.conversation.exchanges
    said = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": first.answer},
        {"role": "user", "content": "How are you?"},
    ]
    assert second == Exchange("How are you?", make_runner(tmp_path).generate(said, **SHORT).text)
    assert first.answer in capsys.readouterr().out


def test_empty_messages_are_passed_over(runner):
    assert questions(talk(runner, "", "Hello")) == ["Hello"]


def test_bye_ends_the_chat(runner):
    assert questions(talk(runner, "Hello", "/bye", "never read")) == ["Hello"]


def test_one_ctrl_c_at_the_prompt_keeps_the_conversation_and_says_how_to_leave(runner, capsys):
    chat = talk(runner, "Hello", CTRL_C, "one")

    assert questions(chat) == ["Hello", "one"]
    assert capsys.readouterr().err.count("press Ctrl-C again or type /bye to leave") == 1


def test_ctrl_c_twice_at_the_prompt_leaves(runner):
    assert questions(talk(runner, "Hello", CTRL_C, CTRL_C, "never read")) == ["Hello"]


def test_a_ctrl_c_after_another_message_is_a_first_one_again(runner):
    assert questions(talk(runner, CTRL_C, "Hello", CTRL_C, "one")) == ["Hello", "one"]


def test_a_ctrl_c_that_drops_a_message_does_not_leave(runner):
    assert questions(talk(runner, CTRL_C, DROPPED, "Hello", CTRL_C, CTRL_C, "never read")) == ["Hello"]
    assert questions(talk(runner, DROPPED, CTRL_C, "never read")) == []


def test_ctrl_c_inside_a_message_of_many_lines_drops_the_message(runner):
    lines = iter(['"""half', CTRL_C, "Hello", "/bye"])

    def read_line(prompt: str) -> str:
        return raising_ctrl_c(next(lines))

    chat = TerminalChat(LocalBackend(runner), Screen(), session=ChatSession(given=SHORT))
    run_chat(chat, lambda: read_message(read_line))

    assert questions(chat) == ["Hello"]


def test_a_ctrl_c_that_comes_just_after_an_answer_counts_as_the_first_at_the_prompt(runner, capsys):
    class LateScreen(Screen):
        def end_line(self) -> None:
            signal.raise_signal(signal.SIGINT)
            super().end_line()

    once = talk(runner, "Hello", screen=LateScreen())
    told = capsys.readouterr().err
    twice = talk(runner, "Hello", CTRL_C, "never read", screen=LateScreen())

    assert questions(once) == questions(twice) == ["Hello"]
    assert "Ctrl-C again" in told


def test_undo_forgets_the_last_exchange(runner):
    assert questions(talk(runner, "Hello", "one", "/undo")) == ["Hello"]


def test_clear_forgets_the_conversation_and_keeps_the_tree(runner):
    chat = talk(runner, "Hello", "/clear")

    assert questions(chat) == []
    assert runner.cache.stats()["tokens"] > 0


def test_retry_with_a_seed_draws_anew_in_place_of_the_last_answer(runner):
    given = {"max_tokens": 5, "temperature": 2.0, "seed": 3}
    once = talk(runner, "Hello", given=given)

    again = talk(runner, "Hello", "/retry", given=given)

    assert questions(again) == ["Hello"]
    assert again.conversation.exchanges[0].answer != once.conversation.exchanges[0].answer


def test_retry_before_any_answer_is_told(runner, capsys):
    talk(runner, "/retry", "/undo")

    told = capsys.readouterr().err
    assert "no answer to try again" in told and "nothing to undo" in told


def test_set_changes_parameters_and_system_text(runner):
    chat = talk(runner, "/set temperature 0.5", '/set stop "a b" c', "/set seed 4", "/set system Be brief.", "/set verbose")

    assert chat.session.given == {"max_tokens": 5, "temperature": 0.5, "stop": ["a b", "c"], "seed": 4}
    assert chat.conversation.system == "Be brief."
    assert chat.is_verbose


def test_words_for_yes_and_no_are_those_of_the_settings_in_any_case(runner):
    assert talk(runner, "/set ignore_eos On", "/set loop_guard False").session.given == {
        "max_tokens": 5,
        "ignore_eos": True,
        "loop_guard": False,
    }


def test_a_parameter_that_is_set_to_none_is_the_models_own_again(runner, capsys):
    assert talk(runner, "/set parameter max_tokens none").session.given == {}
    assert "max_tokens is the model's own" in capsys.readouterr().err


def test_a_retry_that_gives_the_same_answer_says_why(runner, capsys):
    talk(runner, "Hello", "/retry")

    assert "the answer stays the same, as at temperature 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("/set temprature 1", "unknown parameter 'temprature'; the parameters are max_tokens, temperature"),
        ("/set temperature hot", "temperature is 'hot', and must be a number"),
        ("/set temperature -1", "temperature is -1.0, and must be at least 0"),
        ("/set ignore_eos maybe", "must be on or off"),
        ('/set stop "open', "must be one or more texts"),
        ("/set", "usage: /set NAME VALUE"),
        ("/dance", "unknown command /dance; the commands are /set"),
    ],
)
def test_a_bad_command_is_told_and_changes_nothing(runner, capsys, command, complaint):
    chat = talk(runner, command)

    assert complaint in capsys.readouterr().err
    assert chat.session.given == SHORT


def test_verbose_answers_are_followed_by_their_cost(runner, capsys):
    talk(runner, "/set verbose", "Hello", "one")

    assert capsys.readouterr().err.count("first token") == 2


def test_the_tree_is_drawn(runner, capsys):
    talk(runner, "Hello", "/tree")

    assert str(runner.cache.tree()) in capsys.readouterr().out


def test_the_tree_fits_the_terminal(runner, capsys, monkeypatch):
    monkeypatch.setattr(Screen, "width", 40)
    talk(runner, "Hello", "/tree")

    assert runner.cache.tree().draw(40) in capsys.readouterr().out


def test_show_tells_model_and_settings(runner, capsys):
    talk(runner, "/set top_k 9", "/show")

    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["model", "tiny"] in shown
    assert ["engine", "fake"] in shown
    assert ["top_k", "9"] in shown


def test_explain_tells_what_would_be_cached(runner, capsys):
    talk(runner, "Hello", "/clear", "/explain Hello")

    assert "the whole prompt is known" in capsys.readouterr().out


def test_help_lists_every_command(runner, capsys):
    talk(runner, "/help")

    shown = capsys.readouterr().out
    assert all(name in shown for name in ("/set", "/show", "/tree", "/retry", "/undo", "/clear", "/bye", "temperature"))


def test_an_engine_error_is_told_and_the_chat_goes_on(runner, capsys):
    def fail(*args):
        runner.runtime.engine.evaluate = evaluate
        raise EngineError("it broke")

    evaluate, runner.runtime.engine.evaluate = runner.runtime.engine.evaluate, fail

    assert questions(talk(runner, "Hello", "one")) == ["one"]
    assert "error: it broke" in capsys.readouterr().err


def test_a_question_whose_answer_failed_can_be_asked_again(runner):
    def fail(*args):
        runner.runtime.engine.evaluate = evaluate
        raise EngineError("it broke")

    evaluate, runner.runtime.engine.evaluate = runner.runtime.engine.evaluate, fail

    assert questions(talk(runner, "Hello", "/retry")) == ["Hello"]


def test_a_message_too_long_for_the_context_is_told_and_dropped(tmp_path, capsys):
    runner = make_runner(tmp_path, FakeEngine(vocab_size=len(byte_level()), context_tokens=60))

    assert questions(talk(runner, "one " * 60, "Hello")) == ["Hello"]
    assert "the context holds 60" in capsys.readouterr().err


class InterruptedEngine(FakeEngine):
    """Ctrl-C comes with the evaluation of this number, which ends when the request has been cancelled by it."""

    interrupt_at = 1
    scheduler: Scheduler

    def evaluate(self, lane, ids):
        if len(self.evaluated) == self.interrupt_at:
            self.interrupt()
        return super().evaluate(lane, ids)

    def interrupt(self):
        signal.raise_signal(signal.SIGINT)  # the main thread handles it, as any signal
        wait_until(lambda: all(job.is_cancelled for job in self.scheduler.running))


def interrupted(tmp_path, at: int, kind: type[InterruptedEngine] = InterruptedEngine):
    """A runner whose prompts take several chunks: it can be stopped between two of them."""
    engine = kind(vocab_size=len(byte_level()))
    engine.interrupt_at = at
    runner = make_runner(tmp_path, engine, chunk=16)
    engine.scheduler = runner.runtime.worker.scheduler
    return runner


def test_a_stopped_answer_is_kept_as_far_as_it_came(tmp_path, capsys):
    whole = make_runner(tmp_path).generate([{"role": "user", "content": "Hello"}], max_tokens=20).text

    chat = talk(interrupted(tmp_path, at=8), "Hello", given={"max_tokens": 20})

    (exchange,) = chat.conversation.exchanges
    assert whole.startswith(exchange.answer) and len(exchange.answer) < len(whole)
    assert "(stopped)" in capsys.readouterr().err


def test_a_retry_that_is_stopped_before_its_first_word_keeps_the_old_answer(tmp_path, capsys):
    runner = interrupted(tmp_path, at=-1)
    chat = talk(runner, "Hello")
    before = list(chat.conversation.exchanges)
    runner.cache.clear()
    runner.runtime.engine.interrupt_at = len(runner.runtime.engine.evaluated)

    chat.retry()

    assert chat.conversation.exchanges == before
    assert "stopped before the first word" in capsys.readouterr().err


def test_a_second_ctrl_c_does_not_wait(tmp_path):
    ends = threading.Event()

    class Stubborn(InterruptedEngine):
        def interrupt(self):
            super().interrupt()
            signal.raise_signal(signal.SIGINT)
            assert ends.wait(BOUND_S)  # the step ends after the chat alone

    with interrupted(tmp_path, at=0, kind=Stubborn) as runner:
        with pytest.raises(KeyboardInterrupt):
            talk(runner, "Hello")
        ends.set()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_branch_goes_on_from_what_was_said_and_the_other_stays(runner, capsys):
    chat = talk(runner, "Hello", "/branch poem", "one", "/switch main", "How are you?", "/switch")

    assert questions(chat) == ["Hello", "How are you?"]
    assert [each.question for each in chat.session.branches["poem"].exchanges] == ["Hello", "one"]
    shown = capsys.readouterr().out
    assert "* main" in shown and "  poem" in shown


def test_a_branch_reuses_the_prefix_that_it_shares(runner):
    talk(runner, "Hello")
    before = runner.cache.stats()["tokens"]

    talk(runner, "Hello", "/branch", "one")

    added = runner.cache.stats()["tokens"] - before
    assert 0 < added < before


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("/switch nowhere", "there is no branch nowhere; the branches are main"),
        ("/branch main", "there is a branch main already"),
        ("/branch ../up", "'../up' is not a name"),
        ("/save", "usage: /save NAME"),
        ("/save ../up", "'../up' is not a name"),
        ("/load nothing", "there is no chat nothing; there are none yet"),
    ],
)
def test_a_bad_name_is_told(runner, tmp_path, capsys, command, complaint):
    chat = talk(runner, "Hello", command, sessions=Sessions(tmp_path / "chats"))

    assert complaint in capsys.readouterr().err
    assert questions(chat) == ["Hello"]


def test_a_saved_chat_goes_on_with_all_its_branches(runner, tmp_path, capsys):
    sessions = Sessions(tmp_path / "chats")
    talk(runner, "Hello", "/branch poem", "one", "/save trip", system="Be brief.", sessions=sessions)

    chat = talk(runner, "/load trip", "How are you?", given={"top_k": 9}, sessions=sessions)

    assert questions(chat) == ["Hello", "one", "How are you?"]
    assert chat.conversation.system == "Be brief."
    assert chat.session.given == SHORT
    assert "going on with the chat trip: 4 messages; the last was 'one'" in capsys.readouterr().err


def test_clear_leaves_what_was_saved(runner, tmp_path):
    sessions = Sessions(tmp_path / "chats")

    chat = talk(runner, "Hello", "/save trip", "one", "/clear", "How are you?", sessions=sessions)
    chat.keep()

    assert [each.question for each in sessions.load("trip").conversation.exchanges] == ["Hello", "one"]
    assert [each.question for each in sessions.load("last").conversation.exchanges] == ["How are you?"]


def test_another_model_goes_on_with_the_conversation(runner, tmp_path, monkeypatch, capsys):
    other = make_runner(tmp_path / "other")
    monkeypatch.setattr("bough.cli.backends.local.load", lambda name, **settings: other)

    chat = talk(runner, "Hello", "/model other", "one")

    assert questions(chat) == ["Hello", "one"]
    assert other.cache.stats()["tokens"] > 0
    with pytest.raises(RequestError, match="the runner is closed"):
        runner.generate("Hello", raw=True)

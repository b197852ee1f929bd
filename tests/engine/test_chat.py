"""Chats as ids: the template's marks, the loss mask, streamed text, stop strings."""

import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.engine.chat import ChatTokenizer, mask_runs
from slipstream.engine.errors import SlipstreamError
from slipstream.engine.serving.front import find_chat_problem
from slipstream.engine.text_stop import StopStrings, StreamDetokenizer
from slipstream.tasks.coloured_sample import coloured_sample

Make = Callable[..., ChatTokenizer]


@pytest.fixture(scope="module")
def make(chats: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """make(family): a tokenizer with the template of that family (`None` = none); each is made once."""
    made: dict[str | None, ChatTokenizer] = {}

    def one(family: str | None = "roles") -> ChatTokenizer:
        if family not in made:
            directory = tmp_path_factory.mktemp("tokenizer")
            template = None if family is None else chats.TEMPLATES.get(family, chats.FOREIGN_TEMPLATE)
            eos = {"headers": "<stop>", "questions": "</s>"}.get(str(family), "<|im_end|>")
            chats.save_tokenizer(directory, template, eos)
            made[family] = ChatTokenizer(directory)
        return made[family]

    return one


def chat(*texts: str) -> list[dict[str, str]]:
    """User and assistant in turn."""
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


# ---- marks


@pytest.mark.parametrize(
    ("family", "header", "end"),
    [
        ("roles", "<|im_start|>assistant\n", "<|im_end|>"),
        ("headers", "<start>assistant<end>\n\n", "<stop>"),
        ("questions", "[/Q]", "</s>"),
        ("thoughts", "<|im_start|>assistant\n", "<|im_end|>"),
    ],
)
def test_marks_are_read_off_the_template(make: Make, family: str, header: str, end: str) -> None:
    tokenizer = make(family)
    assert tokenizer.decode(tokenizer.marks.header, skip_special_tokens=False) == header
    assert tokenizer.decode([tokenizer.marks.end], skip_special_tokens=False) == end
    assert tokenizer.marks.end in tokenizer.stop_token_ids


def test_a_template_of_another_model_has_no_marks(make: Make) -> None:
    with pytest.raises(SlipstreamError, match="does not frame answers") as error:
        _ = make("foreign").marks
    assert error.value.fault == "F10"


@pytest.mark.parametrize(("family", "words"), [("roles", ""), (None, "no chat template"), ("foreign", "frame answers")])
def test_a_server_finds_out_at_its_start_whether_chats_can_be_served(make: Make, family: str, words: str) -> None:
    found = find_chat_problem(make(family))
    assert words in found
    assert bool(found) == bool(words)


def test_no_template_still_completes_text_but_refuses_chats(make: Make) -> None:
    tokenizer = make(None)
    assert tokenizer.decode(tokenizer.encode("and then")) == "and then"
    assert tokenizer.stop_token_ids == tokenizer.eos_token_ids
    with pytest.raises(SlipstreamError, match="no chat template"):
        tokenizer.encode_chat(chat("hello"))


def test_a_template_that_raises_is_an_error_that_says_why(chats: ModuleType, tmp_path: Path) -> None:
    chats.save_tokenizer(tmp_path, "{{ raise_exception('only one question, please') }}")
    with pytest.raises(SlipstreamError, match="only one question, please"):
        ChatTokenizer(tmp_path).encode_chat(chat("hello"))


def test_a_directory_without_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match="no usable tokenizer"):
        ChatTokenizer(tmp_path)
    (tmp_path / "file").write_text("x")
    for name, words in (("absent", "is not there"), ("file", "is no directory")):
        with pytest.raises(SlipstreamError, match=words) as error:
            ChatTokenizer(tmp_path / name)
        assert "hub" not in str(error.value)
        assert "correct --target" in error.value.do


def test_end_ids_come_from_both_configs(chats: ModuleType, tmp_path: Path) -> None:
    chats.save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 7, "model_type": "llama"}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 7]}')
    tokenizer = ChatTokenizer(tmp_path)
    assert tokenizer.eos_token_ids == (7, 0)
    assert set(tokenizer.stop_token_ids) == {0, 7, tokenizer.marks.end}


# ---- loss mask


@pytest.mark.parametrize("family", ["roles", "headers", "questions"])
def test_mask_covers_every_answer_and_its_end_token_and_nothing_else(make: Make, family: str) -> None:
    tokenizer = make(family)
    ids = tokenizer.encode_chat(chat("what is it", "an apple", "and then?", "the other one"), False)
    mask = tokenizer.loss_mask(ids)
    end = tokenizer.decode([tokenizer.marks.end], skip_special_tokens=False)
    spans = [ids[a:b] for a, b, on in mask_runs(mask) if on]
    # The space that "questions" puts before an answer belongs to it: the model writes that one too.
    texts = [tokenizer.decode(s, skip_special_tokens=False).strip() for s in spans]
    assert texts == [f"an apple{end}", f"the other one{end}"]
    assert all(s[-1] == tokenizer.marks.end for s in spans)


def test_mask_of_generated_ids_does_not_depend_on_how_they_would_be_tokenised(make: Make) -> None:
    """A model may write "and" as a, n, d. Tokenising the text again would give one token, and a mask two too short."""
    tokenizer = make("roles")
    prompt = tokenizer.encode_chat(chat("say and"))
    letters = [tokenizer.encode(letter)[0] for letter in "and"]
    assert tokenizer.encode("and") != letters
    mask = tokenizer.loss_mask([*prompt, *letters, tokenizer.marks.end])
    assert mask.tolist() == [False] * len(prompt) + [True] * 4


def test_an_answer_cut_off_by_the_limit_is_supervised_to_the_last_token(make: Make) -> None:
    tokenizer = make("roles")
    prompt = tokenizer.encode_chat(chat("tell me"))
    mask = tokenizer.loss_mask([*prompt, *tokenizer.encode("once upon")])
    assert int(mask.sum()) == len(tokenizer.encode("once upon"))
    assert bool(mask[-1])


def test_an_answer_that_is_only_the_end_token_counts(make: Make) -> None:
    tokenizer = make("roles")
    prompt = tokenizer.encode_chat(chat("say nothing"))
    assert tokenizer.loss_mask([*prompt, tokenizer.marks.end]).tolist() == [False] * len(prompt) + [True]


def test_what_the_prompt_opens_is_not_the_answer(make: Make) -> None:
    tokenizer = make("thoughts")
    prompt = tokenizer.encode_chat(chat("what is it"))
    assert tokenizer.decode(prompt).endswith("assistant\nTHINK")
    answer = [*tokenizer.encode("it is round THINKan apple"), tokenizer.marks.end]
    assert tokenizer.loss_mask([*prompt, *answer]).tolist() == [False] * len(prompt) + [True] * len(answer)
    history = tokenizer.encode_chat(chat("what is it", "it is round THINKan apple"), False)
    spans = [history[a:b] for a, b, on in mask_runs(tokenizer.loss_mask(history)) if on]
    assert [tokenizer.decode(s) for s in spans] == ["an apple"]


def test_a_question_that_ends_in_a_space_does_not_hide_the_header(make: Make) -> None:
    tokenizer = make("questions")  # two spaces merge into one token
    ids = tokenizer.encode_chat(chat("what is it ", "an apple"), False)
    assert tokenizer.decode([i for i, on in zip(ids, tokenizer.loss_mask(ids), strict=True) if on]) == " an apple"


def test_runs_of_a_mask() -> None:
    assert mask_runs(torch.tensor([0, 1, 1, 0])) == [(0, 1, False), (1, 3, True), (3, 4, False)]
    assert mask_runs(torch.tensor([])) == []


def test_coloured_sample_highlights_the_supervised_tokens_and_survives_brackets(make: Make) -> None:
    from rich.text import Text

    tokenizer = make("roles")
    ids = tokenizer.encode_chat(chat("[red]x[/red] [0] \\", "[bold]y \\[/bold] \\"), False)
    mask = tokenizer.loss_mask(ids)
    text = Text.from_markup(coloured_sample(tokenizer, ids, mask))
    assert text.plain == tokenizer.decode(ids, skip_special_tokens=False)
    green = [text.plain[s.start : s.end] for s in text.spans if "green" in str(s.style)]
    assert green == ["[bold]y \\[/bold] \\<|im_end|>"]
    assert "tokens more" in coloured_sample(tokenizer, ids, mask, max_tokens=5)


# ---- streamed text


class ByteTokens:
    """Ids 0..255 are bytes: characters may be cut anywhere."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")


@given(st.text(max_size=60), st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_pieces_join_to_the_text_and_hold_no_half_character(text: str, seed: int) -> None:
    cuts, data = random.Random(seed), list(text.encode())
    stream, pieces, at = StreamDetokenizer(ByteTokens()), [], 0
    while at < len(data):
        step = cuts.randint(1, 4)
        pieces.append(stream.push(data[at : at + step]))
        at += step
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
        assert "".join(pieces) == text  # nothing is held back once the character is whole
    assert "".join(pieces) + stream.finish() == text


@given(st.lists(st.integers(0, 255), max_size=80))
@settings(max_examples=150, deadline=None)
def test_any_bytes_come_out_as_if_decoded_at_once(data: list[int]) -> None:
    stream = StreamDetokenizer(ByteTokens())
    pieces = [stream.push([byte]) for byte in data] + [stream.finish()]
    assert "".join(pieces) == ByteTokens().decode(data)


class WordTokens:
    """Ids are words with a space before each; decode drops the space before the first, as SentencePiece does."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(f" w{token}" for token in token_ids)[1:]


def test_spaces_survive_where_decoding_starts_again() -> None:
    stream, ids = StreamDetokenizer(WordTokens()), list(range(100))
    assert "".join([stream.push([i]) for i in ids] + [stream.finish()]) == WordTokens().decode(ids)


def test_streaming_with_a_real_tokenizer_leaves_marks_out(make: Make) -> None:
    tokenizer = make("roles")
    text = "the 😀 ends with naïve 漢字 § and an\n\n  indent" * 4
    ids = [*tokenizer.encode(text), tokenizer.marks.end]
    stream = StreamDetokenizer(tokenizer)
    assert "".join([stream.push([i]) for i in ids] + [stream.finish()]) == text


# ---- stop strings


def scan(stops: list[str], pieces: list[str]) -> tuple[list[str], StopStrings]:
    scanner = StopStrings(stops)
    out = [scanner.push(piece) for piece in pieces]
    return [*out, scanner.finish()], scanner


def test_a_stop_string_over_three_tokens_is_found_and_trimmed() -> None:
    out, scanner = scan(["END"], ["ab", "cE", "N", "D!", "more"])
    assert out == ["ab", "c", "", "", "", ""]
    assert scanner.matched == "END"


def test_what_only_looked_like_a_stop_string_is_sent_in_the_end() -> None:
    out, scanner = scan(["END"], ["xE", "N", "x", "EN"])
    assert out == ["x", "", "ENx", "", "EN"]
    assert scanner.matched is None


def test_stop_at_the_very_start_keeps_nothing() -> None:
    out, scanner = scan(["\n"], ["\nabc"])
    assert "".join(out) == ""
    assert scanner.matched == "\n"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings([""])


@given(
    st.text(alphabet="ab", max_size=24),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3),
    st.integers(0, 2**32),
)
@settings(max_examples=300, deadline=None)
def test_the_result_does_not_depend_on_the_cuts(text: str, stops: list[str], seed: int) -> None:
    cuts, pieces, at = random.Random(seed), [], 0
    while at < len(text):
        step = cuts.randint(1, 5)
        pieces.append(text[at : at + step])
        at += step
    out, scanner = scan(stops, pieces)
    # The definition, read literally: the first character at which some stop string is complete.
    for end in range(len(text) + 1):
        complete = [s for s in stops if text[:end].endswith(s)]
        if complete:
            kept = text[: end - max(map(len, complete))]
            break
    else:
        complete, kept = [], text
    assert "".join(out) == kept
    assert (scanner.matched is not None) == bool(complete)

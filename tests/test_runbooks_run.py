"""The commands of the runbooks are run, as they stand there, on this machine and against a real SSH server."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
from click.exceptions import Exit

from slipstream.engine.errors import SlipstreamError
from slipstream.flows import cli
from slipstream.flows.runbooks import ANY, BY_FAULT, runbook_of

ROOT = Path(__file__).parent.parent
RUNBOOKS = sorted((ROOT / "runbooks").glob("*.md"))
# Commands that train, serve or measure for long: the test that runs each.
ELSEWHERE = {
    "run": "tests/flows/test_lifecycle.py",
    "bench": "tests/flows/test_cli.py",
    "parity": "tests/flows/test_cli.py",
    "report": "tests/flows/test_cli.py",
    "roll": "tests/flows/test_roll.py",
    "up": "tests/flows/test_up.py",
    "abandon": "tests/flows/test_cli.py",
    "host provision": "tests/tasks/hosts/test_provision.py",
    "stage parity": "tests/tasks/test_parity.py",
    "stage launch": "tests/tasks/test_launch.py",
    "stage regenerate": "tests/tasks/test_regenerate.py",
    "stage extract": "tests/tasks/test_extract.py",
    "stage train": "tests/tasks/test_train.py",
    "stage convert": "tests/tasks/test_convert.py",
    "stage tune": "tests/tasks/test_measured_lifecycle.py",
    "stage benchmark": "tests/tasks/test_benchmark.py",
}
# A launch line that contradicts itself is the subject there, and the logs of the two others are of their own tests.
CONTRADICTS = ("wrong-flags.md",)
LOGS_ELSEWHERE = ("accept-length-low.md", "slower-than-baseline.md")  # tests/tasks/explain_log/test_files.py


def commands(path: Path) -> list[str]:
    """Every `slipstream ...` line in the code blocks of a runbook, in order; variables before it included."""
    blocks = re.findall(r"```sh\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if re.match(r"([A-Z_]+=\S+ )*slipstream ", line)]


def verb(words: list[str]) -> str:
    return " ".join(words[: 2 if words[0] in ("host", "stage") else 1])


@pytest.fixture(scope="module")
def ssh_tools(load_test_module):
    return load_test_module(ROOT / "tests" / "tasks" / "hosts" / "ssh_server.py")


@pytest.fixture(scope="module")
def place(chats, tiny, tmp_path_factory):
    """A folder as an operator's: a deployment file, the shipped deployments, a server's log."""
    folder = tmp_path_factory.mktemp("operator")
    target = chats.save_chat_target(folder / "target", tiny)
    (folder / "deployment.yaml").write_text(
        f"target: {{source: {target}, dtype: float32}}\n"
        "data: {max_prompt_tokens: 64, max_new_tokens: 32}\nbenchmark: {max_new_tokens: 32}\n"
        "capture: {slots: [1, 2, 3]}\nserver: {max_context_tokens: 128, dtype: float32, device: cpu}\n"
        f"host: {{workdir: {folder / 'runs'}, cache_dir: {folder / 'cache'}}}\n"
    )
    (folder / "configs").symlink_to(ROOT / "configs")
    shutil.copyfile(ROOT / "configs" / "incident-logs" / "launch-2.log", folder / "server.log")
    return folder


@pytest.fixture(scope="module")
def far(place, ssh_tools):
    """The same deployment on a host whose key is trusted."""
    ssh_tools.need_sshd()
    server = ssh_tools.SshServer(place / "sshd")
    server.trust()
    text = (place / "deployment.yaml").read_text()
    host = f"kind: ssh, address: {server.listen}, port: {server.port}, identity_file: {server.user_key}"
    known = f"known_hosts: {server.folder / 'known_hosts'}"
    (place / "far.yaml").write_text(text.replace("host: {", f"host: {{{host}, {known}, "))
    yield place / "far.yaml"
    server.stop()


@pytest.mark.parametrize("path", RUNBOOKS, ids=lambda path: path.name)
def test_the_commands_of_a_runbook_run(path, place, request, monkeypatch, capsys):
    monkeypatch.chdir(place)
    lines = commands(path)
    assert lines
    for line in lines:
        *before, given = line.partition("slipstream ")
        for name, value in (word.split("=", 1) for word in shlex.split(before[0])):
            monkeypatch.setenv(name, value)
        words = shlex.split(given)
        if verb(words) in ELSEWHERE or (words[0] == "explain-log" and path.name in LOGS_ELSEWHERE):
            continue
        config = request.getfixturevalue("far") if words[0] == "host" else place / "deployment.yaml"
        words = [str(config) if word == "CONFIG" else word for word in words]
        try:
            code = cli.app(words, standalone_mode=False)
        except Exit as ended:
            code = ended.exit_code
        allowed = (None, 0, 2) if path.name in CONTRADICTS and words[0] == "plan" else (None, 0)
        assert code in allowed, f"{line}: exit code {code}\n{capsys.readouterr()}"


@pytest.mark.parametrize(("name", "file"), ELSEWHERE.items())
def test_what_is_run_elsewhere_is_run_there(name, file):
    word = name.split()[-1]
    assert word in (ROOT / file).read_text(), f"{file} knows no {word}"


def test_no_entry_of_that_list_is_without_a_runbook():
    used = {verb(shlex.split(line.partition("slipstream ")[2])) for path in RUNBOOKS for line in commands(path)}
    assert ELSEWHERE.keys() <= used


def test_every_error_has_a_runbook():
    names = {path.name for path in RUNBOOKS}
    assert {ANY, *BY_FAULT.values()} <= names
    assert BY_FAULT.keys() == {f"F{number}" for number in range(1, 21)}
    assert runbook_of(SlipstreamError("x")) == ANY
    assert runbook_of(SlipstreamError("x", fault="F15")) == "left-over-server.md"
    assert runbook_of(SlipstreamError("x", fault="F15", runbook="gpu-memory-not-freed.md")) == "gpu-memory-not-freed.md"


def test_the_runbook_of_an_error_is_shown_once(capsys):
    cli.show_error(SlipstreamError("x", do="y"))
    assert capsys.readouterr().err.count("runbook: runbooks/run-failed.md") == 1
    cli.show_error(SlipstreamError("x", runbook="disk-full.md"))
    assert capsys.readouterr().err.count("runbook:") == 1

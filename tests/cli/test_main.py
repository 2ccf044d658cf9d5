"""The program around the commands: version, help, how it ends, what it says, completion."""

import os
import re
import signal
import subprocess
import sys
import time
from importlib.metadata import version

import numpy as np
import pytest
from conftest import BASH, COMMAND, TIMEOUT, assert_refused, environment, files_in, wait_until

from layernorm_cli import __version__
from layernorm_cli.cli import main as main_module
from layernorm_cli.cli.main import app

needs_bash = pytest.mark.skipif(BASH is None, reason="no bash")
COMMANDS = sorted(command.callback.__name__ for command in app.registered_commands)


def test_version(layernorm, main):
    for run in (layernorm, main):
        done = run("--version")
        assert (done.code, done.out, done.err) == (0, f"layernorm {__version__}\n", "")
    assert version("layernorm") == __version__


def test_module(layernorm):
    done = layernorm("--version", command=(sys.executable, "-m", "layernorm_cli"))
    assert (done.code, done.out, done.err) == (0, f"layernorm {__version__}\n", "")
    done = layernorm("nosuch", command=(sys.executable, "-m", "layernorm_cli"))
    assert_refused(done, 2, "nosuch")


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help(option, main):
    done = main(option)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("Usage: layernorm [OPTIONS] COMMAND")
    for name in COMMANDS:
        assert re.search(rf"^  {name} ", done.out, re.MULTILINE)


def test_help_cuts_nothing(main):
    for columns in ("20", "80", "200"):
        assert "..." not in main("--help", COLUMNS=columns).out.replace("[ARGS]...", "")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(command, main):
    one, other = (main(command, option) for option in ("--help", "-h"))
    assert (one.code, one.err) == (0, "")
    assert one.out == other.out
    assert one.out.startswith(f"Usage: layernorm {command}")
    examples = one.out.split("  Examples:\n")[1].splitlines()
    assert len(examples) in (2, 3)
    assert all(f"layernorm {command}" in line for line in examples)


@pytest.mark.parametrize("variables", [{"FORCE_COLOR": "1"}, {"TERM": "xterm-256color"}], ids=str)
def test_help_has_no_escapes_off_a_terminal(variables, main):
    assert main("apply", "--help", **variables).out == main("apply", "--help").out
    assert "\x1b" not in main("apply", "--nosuch", **variables).err


@pytest.mark.parametrize(
    ("arguments", "mentions"),
    [
        ([], ["command", "layernorm --help"]),
        (["nosuch"], ["'nosuch'", "layernorm --help"]),
        (["Apply"], ["'Apply'"]),
        (["--nosuch"], ["--nosuch", "layernorm --help"]),
        (["--version", "--nosuch"], ["--nosuch"]),
        (["apply"], ["X", "layernorm apply --help"]),
        (["apply", "--thread", "1", "x.npy"], ["--thread", "--threads", "layernorm apply --help"]),
        (["apply", "x.npy", "--eps"], ["--eps", "--help"]),
        (["\x1b[31m\n"], ["\\x1b[31m\\n"]),
    ],
    ids=" ".join,
)
def test_usage_errors(arguments, mentions, main):
    assert_refused(main(*arguments), 2, *mentions)


@pytest.mark.parametrize(
    ("option", "value"),
    [("--threads", "0"), ("--threads", "two"), ("--axis", "one"), ("--kind", "batch")],
)
def test_usage_errors_show_what_was_found(option, value, x, main):
    done = main("apply", "x.npy", option, value)
    assert_refused(done, 2, option)
    assert re.search(rf"\b{value}\b", done.err.replace("greater than or equal to", ""))


@pytest.mark.parametrize(
    "rest", [["--help"], ["--version"], ["apply", "--help"], ["apply", "x.npy"]], ids=" ".join
)
def test_closed_pipe_ends_quietly(rest, x, layernorm):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = layernorm(*rest, stdout=writing)
    finally:
        os.close(writing)
    assert (done.code, done.err) == (0, "")


@pytest.mark.parametrize("closing", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_closed_streams(closing, x, shell):
    done = shell(f"$LAYERNORM apply x.npy -o y.npy {closing}")
    assert (done.code, done.err) == (0, "")
    assert done.created == {"y.npy"}
    assert np.load("y.npy").shape == (3, 4)


@pytest.mark.parametrize("closing", ["2>&-", "2>/dev/full"])
def test_nobody_hears_the_error(closing, shell):
    assert shell(f"$LAYERNORM apply missing.npy {closing}").code == 3


@pytest.mark.parametrize("closing", ["<&-", "< /dev/null"])
def test_no_standard_input(closing, shell):
    assert_refused(shell(f"$LAYERNORM apply - {closing}"), 3, "-: ", "empty")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "ascii:strict", "utf-8"])
def test_encodings_of_messages(encoding, layernorm):
    done = layernorm("apply", "ü中.npy", PYTHONIOENCODING=encoding)
    message = done.stderr.decode(encoding.split(":")[0])
    assert done.code == 3
    shown = {"latin-1": "ü\\u4e2d", "utf-8": "ü中"}.get(encoding, "\\xfc\\u4e2d")
    assert message.startswith(f"layernorm: {shown}.npy: no such file")


def test_help_on_ascii_stdout(layernorm):
    done = layernorm("apply", "--help", PYTHONIOENCODING="ascii:strict")
    assert (done.code, done.err) == (0, "")
    assert done.stdout.isascii()


def test_debug_shows_the_traceback(layernorm):
    for options, variables in ((["--debug"], {}), ([], {"LAYERNORM_DEBUG": "1"})):
        done = layernorm("apply", "missing.npy", *options, **variables)
        assert done.code != 0
        assert done.err.startswith("Traceback")
        assert "InputError: missing.npy: no such file or directory" in done.err


@pytest.mark.parametrize("value", ["", "0", "false", "no", "off"])
def test_debug_is_off(value, main):
    assert_refused(main("apply", "missing.npy", LAYERNORM_DEBUG=value), 3, "missing.npy")


@pytest.mark.parametrize(
    ("error", "mention"),
    [(MemoryError(), "memory"), (OSError(5, "Input/output error", "x.npy"), "Input/output error")],
    ids=["memory", "system"],
)
def test_errors_of_the_system(error, mention, main, monkeypatch):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(main_module, "app", fail)
    assert_refused(main("apply", "x.npy"), 3, mention)


SIGNAL_AT_START = "import os, signal, time; os.kill(os.getpid(), signal.{name}); time.sleep(5)"


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_signal_while_starting(name, here):
    """Ctrl-C in the first tenth of a second: typer is being imported."""
    (here / "typer.py").write_text(SIGNAL_AT_START.format(name=name))
    done = subprocess.run(
        [COMMAND, "apply", "x.npy"],
        env=environment(PYTHONPATH=str(here)),
        capture_output=True,
        timeout=TIMEOUT,
        check=False,
    )
    number = getattr(signal, name)
    assert done.returncode in (-number, 128 + number)
    assert (done.stdout, done.stderr) == (b"", b"")


@needs_bash
@pytest.mark.parametrize("name", ["INT", "HUP"])
def test_ignored_signals_stay_ignored(name, x, here):
    """As under nohup."""
    data = (here / "x.npy").read_bytes()
    line = f"trap '' {name}; exec \"$0\" apply - -o y.npy --quiet"
    command = [BASH, "-c", line, COMMAND]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment()) as process:
        process.stdin.write(data[:-4])
        process.stdin.flush()
        wait_until(lambda: len(files_in(here)) > 1, "the output's beginning", process)
        process.send_signal(getattr(signal, f"SIG{name}"))
        time.sleep(0.1)
        process.stdin.write(data[-4:])
        process.stdin.close()
        assert process.wait(TIMEOUT) == 0
    assert np.load("y.npy").shape == x.shape


@needs_bash
def test_completion_script(layernorm):
    by_variable = layernorm(_LAYERNORM_COMPLETE="source_bash")
    assert by_variable.code == 0
    assert "complete -o default -F _layernorm_completion layernorm" in by_variable.out
    assert subprocess.run([BASH, "-n"], input=by_variable.stdout, check=False).returncode == 0


def test_show_completion(shell):
    done = shell("$LAYERNORM --show-completion bash; true")
    assert (done.code, done.err) == (0, "")
    assert "complete -o default -F _layernorm_completion layernorm" in done.out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("layernorm app", "apply"),
        ("layernorm apply --gam", "--gamma\n--gamma-offset"),
        ("layernorm apply --kind ", "layer\nrms"),
        ("layernorm apply --format j", "json\njsonl"),
    ],
)
def test_completion(words, expected, layernorm):
    done = layernorm(
        _LAYERNORM_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(len(words.split(" ")) - 1)
    )
    assert (done.code, done.out.strip(), done.err) == (0, expected, "")

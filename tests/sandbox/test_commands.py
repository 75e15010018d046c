"""Commands: whatever untrusted code does, the host gets bounded bytes in bounded time and nothing survives."""

from __future__ import annotations

import asyncio
import time

import pytest

from cadenza.sandbox import Limits, SandboxGone, SandboxSpec

pytestmark = pytest.mark.needs_namespaces


def sh(sandbox, script, **more):
    return sandbox.exec(["sh", "-c", script], **more)


def alive(sandbox, words):
    """How many processes of the sandbox have ``words`` in their command line, whole, not as a part of a number or a
    name (the looking one left out)."""
    code = (
        "import os,sys\nn=0\nfor p in os.listdir('/proc'):\n"
        "  if p.isdigit() and int(p) != os.getpid():\n"
        "    try: line = open(f'/proc/{p}/cmdline','rb').read().replace(b'\\0', b' ')\n"
        "    except OSError: continue\n"
        "    n += f' {sys.argv[1]} '.encode() in b' ' + line\nprint(n)"
    )
    return sandbox.exec(["python3", "-S", "-c", code, words])


def test_invalid_utf8_output_arrives_as_bytes(sandbox, run):
    result = run(sh(sandbox, r"printf '\360'; printf '\377' >&2"))
    assert (result.rc, result.stdout, result.stderr) == (0, b"\xf0", b"\xff")


def test_busy_loop_is_gone_after_its_timeout(sandbox, run):
    start = time.monotonic()
    result = run(sandbox.exec(["python3", "-S", "-c", "while True: pass"], timeout_s=0.5))
    assert result.timed_out and time.monotonic() - start < 5
    assert run(alive(sandbox, "while True: pass")).stdout == b"0\n"


def test_daemonized_grandchild_neither_holds_the_call_nor_survives_it(sandbox, run):
    start = time.monotonic()
    result = run(sh(sandbox, "setsid sleep 77 & echo hi", timeout_s=0.5))
    assert result.stdout == b"hi\n" and result.timed_out
    assert time.monotonic() - start < 5
    assert run(alive(sandbox, "sleep 77")).stdout == b"0\n"


def test_output_before_the_timeout_is_kept(sandbox, run):
    result = run(sh(sandbox, "echo a; echo b >&2; sleep 99", timeout_s=0.4))
    assert (result.stdout, result.stderr, result.timed_out) == (b"a\n", b"b\n", True)


def test_background_process_without_our_pipes_lives_on_and_survives_a_later_timeout(sandbox, run):
    first = run(sh(sandbox, "sleep 88 >/dev/null 2>&1 & echo started", timeout_s=5))
    assert first.stdout == b"started\n" and not first.timed_out
    run(sh(sandbox, "sleep 99", timeout_s=0.3))
    assert run(alive(sandbox, "sleep 88")).stdout == b"1\n"
    assert run(alive(sandbox, "sleep 99")).stdout == b"0\n"


def test_output_flood_keeps_head_and_tail_and_says_how_much_is_missing(sandbox, run):
    script = "echo FIRST; yes | head -c 20000000; echo LAST"
    result = run(sh(sandbox, script, timeout_s=30))
    assert result.rc == 0 and result.truncated
    assert result.stdout.startswith(b"FIRST\n") and result.stdout.endswith(b"LAST\n")
    assert len(result.stdout) < 300_000
    kept = sandbox.spec.limits.output_bytes
    assert b"\n... %d bytes elided ...\n" % (20_000_000 + 6 + 5 - kept) in result.stdout


@pytest.mark.parametrize(
    "command",
    [
        "read x",
        "python3 -i",
        "cat",
        "git commit --allow-empty -m x || true; $GIT_EDITOR; echo | $PAGER",
        "exec </dev/tty",
    ],
)
def test_interactive_command_returns_at_once(sandbox, run, command):
    result = run(sh(sandbox, command, timeout_s=20))
    assert not result.timed_out and result.duration_s < 10


def test_stdin_larger_than_a_pipe_is_delivered(sandbox, run):
    data = bytes(range(256)) * 4096
    assert run(sandbox.exec(["cat"], stdin=data[: 200 << 10])).stdout == data[: 200 << 10]


def test_missing_program_is_a_result_and_not_a_crash(sandbox, run):
    assert run(sandbox.exec(["no-such-program"])).rc == 127
    assert run(sandbox.exec(["/etc/passwd"])).rc == 126
    assert run(sandbox.exec(["true"], cwd="/nowhere")).rc == 127
    assert run(sandbox.exec(["true"])).rc == 0


def test_signal_is_a_negative_code(sandbox, run):
    assert run(sh(sandbox, "kill -9 $$")).rc == -9


def test_environment_is_the_specified_one_and_nothing_of_the_host(backend, run, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "hunter2")

    async def scenario():
        sandbox = await backend.create(SandboxSpec(env={"COLOUR": "blue"}))
        result = await sandbox.exec(["env"], env={"SIZE": "9"})
        await sandbox.destroy()
        return result.stdout

    out = run(scenario())
    assert b"COLOUR=blue" in out and b"SIZE=9" in out and b"GIT_EDITOR=true" in out
    assert b"SECRET_KEY" not in out


def test_fork_bomb_is_stopped_and_the_sandbox_answers_afterwards(backend, run):
    async def scenario():
        sandbox = await backend.create(SandboxSpec(limits=Limits(processes=40)))
        bomb = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
        result = await sandbox.exec(["python3", "-S", "-c", bomb], timeout_s=1.5)
        count = await sandbox.exec(["sh", "-c", "ls -d /proc/[0-9]* | wc -l"])
        await sandbox.destroy()
        return result, int(count.stdout)

    result, left = run(scenario())
    assert result.timed_out or result.limit == "processes"
    assert left < 8


def test_memory_of_all_processes_together_is_bounded(backend, run):
    async def scenario():
        sandbox = await backend.create(SandboxSpec(limits=Limits(memory_bytes=150 << 20)))
        one = await sandbox.exec(["python3", "-S", "-c", "x = bytearray(400 << 20)"])
        child = "x = b'a' * (60 << 20); import time; time.sleep(60)"
        several = f'for i in 1 2 3 4 5; do python3 -S -c "{child}" & done; wait'
        many = await sandbox.exec(["sh", "-c", several], timeout_s=20)
        again = await sandbox.exec(["echo", "alive"])
        await sandbox.destroy()
        return one, many, again

    one, many, again = run(scenario())
    assert one.rc == 1 and b"MemoryError" in one.stderr
    assert many.limit == "memory" and many.duration_s < 15
    assert again.stdout == b"alive\n"


def test_disk_filler_is_stopped_at_the_quota(backend, run):
    async def scenario():
        sandbox = await backend.create(SandboxSpec(limits=Limits(disk_bytes=8 << 20)))
        result = await sandbox.exec(["sh", "-c", "dd if=/dev/zero of=/work/big bs=1M count=64"])
        with pytest.raises(OSError, match="No space"):
            await sandbox.write("more", b"x" * (4 << 20))
        size = len(await sandbox.read("big"))
        await sandbox.destroy()
        return result, size

    result, size = run(scenario())
    assert result.rc != 0 and b"No space left" in result.stderr
    assert size <= 8 << 20


def test_cancelled_call_stops_its_command_and_the_next_call_gets_its_own_answer(sandbox, run):
    async def scenario():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await sandbox.exec(["sh", "-c", "echo wrong; sleep 66"], timeout_s=60)
        return await sandbox.exec(["echo", "right"], timeout_s=5), await alive(sandbox, "66")

    answer, left = run(scenario())
    assert answer.stdout == b"right\n" and left.stdout == b"0\n"


def test_calls_at_once_are_answered_each_with_its_own_result(sandbox, run):
    async def scenario():
        return await asyncio.gather(*(sandbox.exec(["echo", str(i)]) for i in range(20)))

    assert [r.stdout for r in run(scenario())] == [b"%d\n" % i for i in range(20)]


def test_sandbox_that_ran_out_of_time_is_gone_and_not_a_result(backend, run):
    async def scenario():
        sandbox = await backend.create(SandboxSpec(ttl_s=0.5))
        with pytest.raises(SandboxGone):
            await sandbox.exec(["sleep", "30"], timeout_s=30)
        with pytest.raises(SandboxGone):
            await sandbox.read("x")
        assert not sandbox.alive
        await sandbox.destroy()

    run(scenario())


def test_destroy_twice_and_at_once_does_nothing_more(backend, run):
    async def scenario():
        sandbox = await backend.create(SandboxSpec())
        await asyncio.gather(sandbox.destroy(), sandbox.destroy())
        await sandbox.destroy()
        with pytest.raises(SandboxGone):
            await sandbox.exec(["true"])

    run(scenario())


def test_destroy_ends_a_running_command(backend, run):
    async def scenario():
        sandbox = await backend.create(SandboxSpec())
        running = asyncio.ensure_future(sandbox.exec(["sleep", "60"], timeout_s=60))
        await asyncio.sleep(0)
        await sandbox.destroy()
        with pytest.raises(SandboxGone):
            await running

    run(scenario())

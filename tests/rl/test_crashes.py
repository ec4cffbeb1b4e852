"""Crashes and abuse of a run folder: kills, full and read-only disks, damage, clocks that jump, two runs at once.

Kills at every update and every moment of a save stand in test_kill_and_resume.py, whose script the random ones use.
"""

import errno
import fcntl
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import test_kill_and_resume as kills
import torch
from tiny import prompt_rows, share_of_letter, tiny_model, tokenizer

from grpo_moe import GRPOConfig, GRPOTrainer
from grpo_moe.rl.capsule import save_capsule
from grpo_moe.rl.display import PlainDisplay
from grpo_moe.rl.html_report import write_html_report
from grpo_moe.rl.launch import DOCTOR_VARIABLE
from grpo_moe.rl.loading import load_policy
from grpo_moe.rl.metrics import MetricsWriter, read_metrics
from grpo_moe.rl.report import write_completions, write_summary
from grpo_moe.rl.run_folder import RUN_FILE, check_run_folder, find_checkpoint, list_checkpoints
from grpo_moe.rl.run_lock import LOCK_FILE, folder_lock
from grpo_moe.types import RolloutBatch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits files and mounts as Linux does")

KILLS = 20


@pytest.fixture(autouse=True)
def no_curves(monkeypatch):
    """They are most of the time of a run as short as these."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path, **options: Path(path).touch())


@pytest.fixture
def whole(tmp_path_factory):
    """Weights and metrics of the run that nothing stopped."""
    return kills._whole(tmp_path_factory, ())


@pytest.fixture
def saved(tmp_path):
    """A run of 8 updates with the checkpoints 6 and 8."""
    kills.trainer(tmp_path, max_steps=8).train()
    return tmp_path


# --- kills


@pytest.mark.slow
def test_a_run_killed_at_random_times_and_random_bytes_of_a_checkpoint_ends_as_the_whole_one(tmp_path, whole, saved):
    draw = random.Random(20)
    largest = max(path.stat().st_size for path in (saved / "checkpoint-8").iterdir())
    points = [{"after_s": draw.uniform(0, 2.5)} for _ in range(KILLS // 2)]
    points += [{"save": draw.randint(1, 6), "bytes": draw.randrange(1, largest)} for _ in range(KILLS // 2)]
    kills.kills_in_a_script(tmp_path, points)
    for number in range(KILLS):
        kills.assert_ends_as(whole, tmp_path / str(number))
        assert not list((tmp_path / str(number)).glob("*.tmp"))


def test_what_a_killed_process_was_writing_goes_at_the_next_start(tmp_path):
    (tmp_path / "completions").mkdir()
    for name in ("metrics.jsonl.123.tmp", "summary.json.9.tmp", "completions/completions_000002.parquet.123.tmp"):
        (tmp_path / name).write_text("half")
    (tmp_path / "mine.tmp").write_text("of the user")
    kills.trainer(tmp_path, max_steps=2).train()
    assert [path.name for path in tmp_path.rglob("*.tmp")] == ["mine.tmp"]


# --- a full disk


@contextmanager
def files_of_at_most(size):
    """No file can grow beyond so many bytes; needs no rights, and the error is as sudden as that of a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def at_update(run, number, act):
    """``act`` is called before the optimiser's update of this number, from 1."""
    step, count = run.optimizer.step, iter(range(1, kills.UPDATES + 1))

    def step_and_act():
        if next(count) == number:
            act()
        step()

    run.optimizer.step = step_and_act


NAMES_THE_PLACE = "must (be in a folder with room that can be|have room and be writable for).*, got.*free some"


@pytest.mark.parametrize("size", [1000, 30_000])
def test_a_run_out_of_room_says_so_and_goes_on_from_what_it_had_said_was_saved(tmp_path, whole, size):
    """1000 bytes end at a line of metrics, 30,000 in the middle of a checkpoint."""
    run, told = kills.trainer(tmp_path), []
    save = run.save_checkpoint
    run.save_checkpoint = lambda: told.append(save()) or told[-1]
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    at_update(run, 7, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard)))
    with files_of_at_most(resource.RLIM_INFINITY), pytest.raises(OSError, match=f"(?s){NAMES_THE_PLACE}"):
        run.train()
    assert [path.name for path in told] == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert list_checkpoints(tmp_path) == told[1:] and not list(tmp_path.glob("*.tmp"))
    kills.assert_ends_as(whole, tmp_path)


@pytest.fixture
def small_disk():
    """A disk of its own, of 2 MiB."""
    folder = tempfile.mkdtemp()
    if os.getuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder]).returncode:
        os.rmdir(folder)
        pytest.skip("mounting is not permitted")
    yield Path(folder)
    subprocess.run(["umount", "-l", folder], check=True)
    os.rmdir(folder)


def fill(disk, left):
    with open(disk / "filler", "wb", buffering=0) as file:
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        file.write(bytes(max(free - left, 0)))


@pytest.mark.parametrize(("update", "left"), [(5, 0), (9, 50_000)])
def test_a_disk_that_is_full_loses_nothing_that_was_saved(small_disk, whole, update, left):
    run = kills.trainer(small_disk / "run", log_completions=True)
    at_update(run, update, lambda: fill(small_disk, left))
    with pytest.raises(OSError, match=f"(?s){NAMES_THE_PLACE}"):
        run.train()
    saved = [int(path.name.removeprefix("checkpoint-")) for path in list_checkpoints(small_disk / "run")]
    assert saved == [step for step in range(2, 13, 2) if step < update][-2:]
    (small_disk / "filler").unlink()
    kills.assert_ends_as(whole, small_disk / "run", log_completions=True)


def test_a_folder_that_turns_read_only_is_named(small_disk, whole):
    run, folder = kills.trainer(small_disk / "run"), str(small_disk / "run")

    def turn_read_only():
        for words in (["--bind", folder], ["-o", "remount,bind,ro"]):
            subprocess.run(["mount", *words, folder], check=True)

    at_update(run, 5, turn_read_only)
    try:
        with pytest.raises(OSError, match=f"(?s){NAMES_THE_PLACE}") as caught:
            run.train()
        assert "Read-only file system" in str(caught.value)
        with pytest.raises(ValueError, match="output_dir must be a folder that can be written.*Read-only file system"):
            kills.trainer(folder)
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
    kills.assert_ends_as(whole, small_disk / "run")


def batch():
    ids = torch.ones(40, 60, dtype=torch.long)
    mask = torch.ones(40, 60, dtype=torch.bool)
    return RolloutBatch(
        input_ids=ids, attention_mask=mask, prompt_lengths=torch.ones(40, dtype=torch.long), completion_ids=ids,
        completion_mask=mask, advantages=torch.ones(40), sampling_logps=torch.randn(40, 60),
    )  # fmt: skip


def rows(count):
    return [{"step": 1, "prompt": f"{i}", "completion": os.urandom(40).hex(), "reward": 1.0} for i in range(count)]


WRITERS = {
    "completions.parquet": lambda path: write_completions(path, rows(300)),
    "summary.json": lambda path: write_summary(path, {str(i): i for i in range(500)}),
    "capsule.safetensors": lambda path: save_capsule(path, batch(), GRPOConfig(), step=1, reason="test"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_without_room_is_named_and_the_one_before_stays(tmp_path, name):
    path = tmp_path / name
    path.write_text("the one before")
    for size in random.Random(0).sample(range(4000), 3):
        with files_of_at_most(size), pytest.raises(OSError, match=f"{path} {NAMES_THE_PLACE}"):
            WRITERS[name](path)
        assert path.read_text() == "the one before" and [p.name for p in tmp_path.iterdir()] == [name]
    WRITERS[name](path)
    assert path.stat().st_size > 4000


def test_a_report_without_room_is_named(tmp_path):
    MetricsWriter(tmp_path / "metrics.jsonl").write({"step": 1, "reward": 0.5})
    write_summary(tmp_path / "summary.json", {"config": {str(i): i for i in range(500)}})
    with files_of_at_most(5000), pytest.raises(ValueError, match="out must be a file that can be written, got .*large"):
        write_html_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_a_line_of_metrics_torn_at_any_byte_costs_that_line_alone(tmp_path):
    path, line = tmp_path / "metrics.jsonl", {"step": 3, "reward": 0.125, "loss": None}
    for kept in range(0, 40, 3):
        path.unlink(missing_ok=True)
        writer = MetricsWriter(path)
        for step in (1, 2):
            writer.write({**line, "step": step})
        with files_of_at_most(path.stat().st_size + kept), pytest.raises(OSError, match=f"{path} {NAMES_THE_PLACE}"):
            writer.write(line)
        assert [row["step"] for row in read_metrics(path)] == [1, 2]
        MetricsWriter(path).write(line)
        assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]


def test_the_error_of_a_reward_function_is_not_hidden_by_a_full_disk(tmp_path):
    made = []

    def raises_later(prompts, completions, letter, **columns):
        if made and made[0].state.step >= 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
            raise KeyError("no such answer")
        return share_of_letter(prompts, completions, letter)

    args = GRPOConfig(
        output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=4, num_generations=4, use_cpu=True,
        max_completion_length=4, show_progress=False, log_completions=False,
    )  # fmt: skip
    run = GRPOTrainer(tiny_model(num_hidden_layers=1), raises_later, args, prompt_rows(5), processing_class=tokenizer())
    made.append(run)
    with files_of_at_most(resource.RLIM_INFINITY), pytest.raises(RuntimeError, match="no such answer") as caught:
        run.train()
    assert "the run up to update 2 could not be saved: output_dir must have room" in caught.value.__notes__[0]


def as_nobody(act):
    """The exit status of ``act`` in a child without the rights of root."""
    child = os.fork()
    if not child:
        try:
            if not os.getuid():
                os.setgroups([])
                os.setuid(65534)
            act()
            os._exit(0)
        except BaseException as error:
            print(error, file=sys.stderr)
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_folder_without_rights_is_refused_before_any_work():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)

        def check():
            for path in (folder, f"{folder}/new"):
                with pytest.raises(ValueError, match=f"output_dir must be a folder that can be written, got '{path}'"):
                    kills.trainer(path)

        assert as_nobody(check) == 0


# --- damage


def damaged(path, draw):
    """The bytes of a file with one bit flipped, and cut somewhere."""
    content = path.read_bytes()
    flipped = bytearray(content)
    flipped[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    return bytes(flipped), content[: draw.randrange(len(content))]


def test_damage_of_any_file_is_named_and_nothing_of_it_is_loaded(saved, whole):
    draw, run = random.Random(1), kills.trainer(saved)
    weights = {name: value.clone() for name, value in run.policy.state_dict().items()}
    files = [path for path in (saved / "checkpoint-8").rglob("*") if path.is_file()]
    assert len(files) >= 5
    for path in files:
        content = path.read_bytes()
        for wrong in (*damaged(path, draw), *damaged(path, draw), b""):
            path.write_bytes(wrong)
            with pytest.raises(ValueError, match=f"{path.name}.*resume_from_checkpoint='{saved / 'checkpoint-6'}'"):
                run.train(resume_from_checkpoint="latest")
        path.write_bytes(content)
    assert all(torch.equal(value, weights[name]) for name, value in run.policy.state_dict().items())
    assert run.state.step == 0 and [path.name for path in list_checkpoints(saved)] == ["checkpoint-6", "checkpoint-8"]
    kills.assert_ends_as(whole, saved)


def test_any_damage_of_the_manifest_is_found(saved):
    draw, path = random.Random(2), saved / "checkpoint-8" / "grpo_state.json"
    content = path.read_bytes()
    wrong = [damaged(path, draw)[cut] for cut in (0, 1) for _ in range(100)]
    wrong = [x for x in wrong if b"E-" not in x]  # the same number as with an e
    for changed in (*wrong, b"[" * 100_000, b'{"step": ' + b"9" * 5000 + b"}", b"null", b"\xff\xfe"):
        path.write_bytes(changed)
        for name in ("latest", str(path.parent)):
            with pytest.raises(ValueError, match="grpo_state.json must be .*checkpoint-6"):
                find_checkpoint(name, str(saved))
    path.write_bytes(content)
    assert find_checkpoint("latest", str(saved)) == path.parent


@pytest.mark.parametrize("wrong", [b"", b"\xff\xfe\x00", None])
def test_a_run_whose_name_is_lost_is_not_started_anew_in_silence(saved, whole, wrong):
    run_id = saved / RUN_FILE
    run_id.unlink() if wrong is None else run_id.write_bytes(wrong)
    newest = str(saved / "checkpoint-8")
    with pytest.raises(
        ValueError, match=f"{run_id} must name the run of the checkpoints.*got no name of a run.*{newest}"
    ):
        kills.trainer(saved).train(resume_from_checkpoint="latest")
    kills.trainer(saved).train(resume_from_checkpoint=newest)
    assert not (saved / "earlier-1").exists() and kills.outcome(saved)[1] == whole[1]


def test_a_model_that_was_cut_off_is_not_loaded(saved):
    draw, path = random.Random(3), saved / "model" / "model.safetensors"
    content = path.read_bytes()
    for _ in range(5):
        path.write_bytes(content[: draw.randrange(len(content))])
        with pytest.raises(ValueError, match=f"model_name_or_path must be in a folder .*, got '{saved / 'model'}'"):
            load_policy(saved / "model")
    path.write_bytes(content)
    assert load_policy(saved / "model")


# --- clocks


def test_a_clock_that_jumps_by_years_changes_nothing(tmp_path, whole, monkeypatch):
    year, now, jumps = 365 * 86_400, time.time, iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: now() + (-1) ** next(jumps) * next(jumps) % 7 * year)
    run = kills.trainer(tmp_path, max_train_seconds=600.0)
    run.train()
    assert run.state.step == kills.UPDATES and 0 < run.state.train_seconds < 600
    assert all(0 <= m["seconds/update"] < 600 for m in read_metrics(tmp_path / "metrics.jsonl"))
    weights, lines = kills.outcome(tmp_path)
    assert lines == whole[1] and all(torch.equal(weights[name], whole[0][name]) for name in weights)


def test_the_time_limit_holds_and_the_newest_checkpoint_is_the_last_by_step_under_a_clock_that_goes_back(
    tmp_path, monkeypatch
):
    start, calls = time.time(), iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: start - 86_400 * next(calls))
    run = kills.trainer(tmp_path, max_train_seconds=1e-6)
    run.train()
    assert run.state.step == 2
    kills.trainer(tmp_path, max_steps=6).train(resume_from_checkpoint="latest")
    for age, path in enumerate(list_checkpoints(tmp_path)):
        os.utime(path, (start - age * 86_400,) * 2)
    assert find_checkpoint("latest", str(tmp_path)).name == "checkpoint-6"


def test_the_time_left_does_not_follow_the_clock(monkeypatch, capsys):
    ticks = iter(range(100))
    monkeypatch.setattr(time, "time", lambda: 1e12 * (-1) ** next(ticks))
    display = PlainDisplay(10, "title")
    for step in range(1, 6):
        display.update(step, {"reward": 0.0})
    assert capsys.readouterr().out.splitlines()[-1].endswith("eta 0s")


# --- two runs at once


def test_a_second_run_in_the_folder_is_refused_and_touches_nothing(saved):
    before = {path: path.read_bytes() for path in saved.rglob("*") if path.is_file() and path.name != LOCK_FILE}
    late = kills.trainer(saved)
    looks = partial(check_run_folder, str(saved), None)
    with folder_lock(saved):
        for start in (looks, late.train, partial(late.train, resume_from_checkpoint="latest")):
            with pytest.raises(ValueError, match=f"of no run that is training, got '{saved}', in which process"):
                start()
    after = {path: path.read_bytes() for path in saved.rglob("*") if path.is_file() and path.name != LOCK_FILE}
    assert after == before
    late.train(resume_from_checkpoint="latest")


def test_the_folder_is_free_when_its_process_is_killed_whatever_children_it_had(tmp_path):
    ready, told = os.pipe()
    holder = os.fork()
    if not holder:
        with folder_lock(tmp_path):
            child = os.fork()
            if child:
                os.write(told, f"{child}".encode())
            time.sleep(60)
        os._exit(0)
    child = int(os.read(ready, 20))
    try:
        with pytest.raises(ValueError, match=f"in which process {holder} on .* is; wait until it ends"):
            check_run_folder(str(tmp_path), None)
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
        with folder_lock(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(ready), os.close(told)


def is_refused_to_another_process(folder):
    """A fork has no lock, as a process that is started by hand."""
    child = os.fork()
    if not child:
        try:
            with folder_lock(folder):
                os._exit(0)
        except ValueError:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_the_lock_lasts_whatever_this_process_does_with_the_file(tmp_path):
    run, copy = tmp_path / "run", tmp_path / "copy"
    with folder_lock(run):
        shutil.copytree(run, copy)
        (run / LOCK_FILE).read_bytes()
        assert is_refused_to_another_process(run)
    assert not is_refused_to_another_process(run) and not is_refused_to_another_process(copy)


def test_a_child_that_leaves_the_lock_does_not_free_it(tmp_path):
    with folder_lock(tmp_path):
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            assert is_refused_to_another_process(tmp_path)
    if not child:
        os._exit(0)


def test_a_look_at_the_folder_neither_refuses_a_start_nor_changes_the_lock(tmp_path):
    """A look holds a shared lock for moments."""
    path = tmp_path / LOCK_FILE
    path.write_text("process 1 on before")
    with open(path) as looks:
        fcntl.flock(looks, fcntl.LOCK_SH)
        check_run_folder(str(tmp_path), None)
        assert path.read_text() == "process 1 on before"
        ends = threading.Timer(0.1, fcntl.flock, (looks, fcntl.LOCK_UN))
        ends.start()
        with folder_lock(tmp_path):
            ends.join()
            assert path.read_text().startswith(f"process {os.getpid()} on ")


def test_a_folder_that_is_gone_at_the_start_is_made_again(tmp_path):
    with folder_lock(tmp_path / "a" / "run"):
        assert (tmp_path / "a" / "run" / LOCK_FILE).is_file()
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError, match=f"{tmp_path}/file/run/{LOCK_FILE} must be in a folder .*, got: Not a directory"):
        with folder_lock(tmp_path / "file" / "run"):
            pass


def test_what_writes_nothing_may_look_into_a_folder_in_training(tmp_path, monkeypatch):
    with folder_lock(tmp_path):
        assert kills.trainer(tmp_path).evaluate() is not None
        monkeypatch.setenv(DOCTOR_VARIABLE, "1")
        check_run_folder(str(tmp_path), None)  # as recipes do, which the doctor runs


def test_a_file_system_without_locks_is_told_of(tmp_path, monkeypatch, caplog):
    def no_locks(file, kind):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with folder_lock(tmp_path):
        assert "cannot be locked ([Errno 37] No locks available): see to it that no second run" in caplog.text
        with pytest.raises(ValueError, match=f"in which process {os.getpid()}, this one is"), folder_lock(tmp_path):
            pass

"""Files of a run: whole or not at all, with errors of their own class that name them."""

import errno
import os

import pytest
from safetensors import SafetensorError

from grpo_moe.rl.files import atomic_path, writing

RULE = "must be in a folder with room that can be written, got: "


@pytest.mark.parametrize("kind", [FileNotFoundError, PermissionError, TimeoutError, InterruptedError, BrokenPipeError])
def test_writing_leaves_an_error_of_something_else_as_it_is(tmp_path, kind):
    number = {FileNotFoundError: errno.ENOENT, PermissionError: errno.EACCES, TimeoutError: errno.ETIMEDOUT,
              InterruptedError: errno.EINTR, BrokenPipeError: errno.EPIPE}[kind]  # fmt: skip
    for raised in (OSError(number, "what happened", "/elsewhere/input"), OSError(number, "what happened")):
        with pytest.raises(kind) as caught, atomic_path(tmp_path / "out"):
            raise raised
        assert caught.value is raised and os.listdir(tmp_path) == []


def test_writing_blames_no_target_for_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(FileNotFoundError) as caught, atomic_path(tmp_path / "out") as temporary:
        temporary.write_text((tmp_path / "input").read_text())
    assert caught.value.filename == tmp_path / "input" or caught.value.filename == str(tmp_path / "input")
    with pytest.raises(SafetensorError, match="deserializing header"), writing(tmp_path / "out"):
        raise SafetensorError("Error while deserializing header: header too large")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EFBIG, errno.EACCES])
def test_writing_names_the_file_and_keeps_errno_and_class(tmp_path, number):
    path = tmp_path / "out"
    inside = None if number == errno.ENOSPC else str(path / "part") if number == errno.EROFS else str(path)
    raised = OSError(number, os.strerror(number), inside)
    with pytest.raises(type(raised), match=f"{path} {RULE}{os.strerror(number)}; free some") as caught, writing(path):
        raise raised
    assert (caught.value.errno, caught.value.filename, caught.value.__cause__) == (number, str(path), raised)


def test_writing_reads_the_errno_of_safetensors(tmp_path):
    with pytest.raises(OSError, match=RULE) as caught, writing(tmp_path / "out"):
        raise SafetensorError("I/O error: No space left on device (os error 28)")
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize("outer", ["out", "other"])
def test_writing_within_writing_names_the_inner_file_once(tmp_path, outer):
    with pytest.raises(OSError, match=RULE) as caught, writing(tmp_path / outer), atomic_path(tmp_path / "out"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert str(caught.value).count("must be") == 1 and caught.value.filename == str(tmp_path / "out")


def test_writing_into_a_folder_that_is_gone_names_the_file(tmp_path):
    (tmp_path / "file").write_text("x")
    for folder, kind in (("gone", FileNotFoundError), ("file", NotADirectoryError)):
        path = tmp_path / folder / "out"
        with pytest.raises(kind, match=f"{path} {RULE}"), atomic_path(path) as temporary:
            temporary.write_text("x")

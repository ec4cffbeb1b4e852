from pathlib import Path

import pytest

from grpo_moe.rl.launch import requested_processes


@pytest.mark.parametrize(
    ("command", "count"),
    [
        ("python /bin/accelerate launch --cpu --num_processes 2 run.py", 2),
        ("python /bin/accelerate launch --cpu --num_processes=3 run.py --x 1", 3),
        ("python -m accelerate.commands.launch --num-processes 4 --cpu run.py", 4),
        ("python /bin/accelerate launch --cpu run.py --num_processes 2", 1),
        ("python /bin/accelerate launch --cpu --num_processes two run.py", 1),
        ("bash -c run.py --num_processes 2", 1),
        ("python other.py --num_processes 2", 1),
    ],
)
def test_the_number_is_read_from_the_launchers_options(command, count):
    assert requested_processes(command.split(), "run.py") == count


def test_the_number_is_read_from_the_launchers_file():
    config = Path(__file__).parents[2] / "recipes" / "accelerate" / "cpu.yaml"
    command = f"python /bin/accelerate launch --config_file {config}"
    assert requested_processes([*command.split(), "run.py"], "run.py") == 2
    assert requested_processes([*command.split(), "--num_processes=3", "run.py"], "run.py") == 3

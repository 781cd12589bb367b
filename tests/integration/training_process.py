"""A program beside test_trainer.py: training runs that need processes of their own, in the folder given.

Imports once and forks for each run, before anything has started threads or an accelerator's state:

    killed            one process, accumulation 2, killed in the middle of the second epoch
    pair_*            two processes (gloo) instead of accumulation 2
    pair_killed       two processes, killed in the middle of the second epoch; pair_resumed goes on from there
"""

import json
import os
import socket
import sys
import traceback
from pathlib import Path

import torch

torch.set_num_threads(1)

import tiny_training as tt  # noqa: E402  # after the thread count
from safetensors.torch import save_file  # noqa: E402
from transformers.trainer_utils import get_last_checkpoint  # noqa: E402

KILL_AT = 5  # three steps an epoch: checkpoints at 2 and 4, the second epoch begins at 3
SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 7}
COUNT = 24  # sequences, three steps of eight; two processes repeat some where an epoch has no whole last step


def train(folder, *, kill=False, resume=False, head="vanilla", **options):
    callbacks = [tt.StopTheProcess(KILL_AT)] if kill else None
    made = tt.trainer(folder, tt.drafter(head), sequences=tt.answers(COUNT), callbacks=callbacks, **options)
    made.train(resume_from_checkpoint=get_last_checkpoint(str(folder)) if resume else None)
    values = made.evaluate()
    if made.is_world_process_zero():
        save_file(tt.trained_weights(made), folder / "final.safetensors")
        result = {"losses": tt.losses(made), "eval": values, "world": made.args.world_size}
        (folder / "result.json").write_text(json.dumps(result))


def in_processes(world, function):
    """Exit status of each rank; negative where a signal ended it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(world):
        if child := os.fork():
            children.append(child)
            continue
        status = 1
        try:
            if world > 1:
                os.environ |= {
                    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
                }  # fmt: skip
            function()
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def main(folder):
    single = {"gradient_accumulation_steps": 2}
    runs = {
        "killed": (1, "killed", {"kill": True, **single, **SAVING}),
        "pair_vanilla": (2, "pair_vanilla", SAVING),
        "pair_killed": (2, "pair_killed", {"kill": True, **SAVING}),
        "pair_resumed": (2, "pair_killed", {"resume": True, **SAVING}),
        "pair_reduced_rnn": (2, "pair_reduced_rnn", {"head": "reduced_rnn"}),
        "pair_rank_0": (2, "pair_rank_0", {"head": "rank_0"}),
    }
    statuses = {}
    for name, (world, place, options) in runs.items():
        (folder / place).mkdir(exist_ok=True)
        statuses[name] = in_processes(world, lambda p=place, o=options: train(folder / p, **o))
    (folder / "statuses.json").write_text(json.dumps(statuses))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""CPU-thread and GPU-memory limits of this replica."""

import os

import torch

from deployments.args import WorkerArgs


def prepare_device(args: WorkerArgs) -> None:
    """Take what the args allow: Ray counts fractions and isolates nothing, so each process caps itself."""
    torch.set_num_threads(args.threads or len(os.sched_getaffinity(0)))
    if args.memory_share is not None and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(args.memory_share)

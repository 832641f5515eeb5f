"""Random generators from 64-bit seeds."""

import numpy as np
import torch

TORCH_SEEDS = 2**32
"""torch's CPU generator keeps the low 32 bits of a seed."""
_WORDS_AT = 24
"""Byte offset of the Mersenne Twister's 624 words in torch's generator state, after the seed and three counters."""


def seeded_generator(seed: int) -> torch.Generator:
    """A CPU generator for an unsigned 64-bit seed; every seed has its own stream.

    Below 2^32 it is torch's own. From 2^32 up the generator's whole state is filled from both halves of the seed by the
    Mersenne Twister's `init_by_array` (Matsumoto & Nishimura 1998), low half first, as numpy's `RandomState` does.
    """
    generator = torch.Generator().manual_seed(seed % TORCH_SEEDS)
    if seed < TORCH_SEEDS:
        return generator
    words = np.random.RandomState([seed % TORCH_SEEDS, seed // TORCH_SEEDS]).get_state(legacy=False)["state"]["key"]
    state = generator.get_state()
    state[:8] = _bytes_of(np.array([seed], np.uint64))
    state[_WORDS_AT : _WORDS_AT + 8 * len(words)] = _bytes_of(words.astype(np.uint64))
    generator.set_state(state)
    return generator


def _bytes_of(numbers: np.ndarray) -> torch.Tensor:
    """The numbers as this machine keeps them in memory."""
    return torch.from_numpy(numbers.view(np.uint8).copy())

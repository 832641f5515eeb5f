"""One layer's parts, in any of the algorithms that trainers write, as one low-rank change and a gain.

Sources: LoRA (Hu et al. 2021), DoRA (Liu et al. 2024), LoHa and LoKr (Yeh et al. 2023, LyCORIS), IA³ (Liu et al. 2022).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from serve_app.engine.adapter_slots import ModuleWeights
from serve_app.engine.adapters.layer_table import UnusableAdapter

Parts = Mapping[str, Tensor]
LowRank = tuple[Tensor, Tensor, int | None]
"""down [rank, in…], up [out, rank], and the dimension that alpha is divided by; None where the writer scales by one."""
IA3 = {"ia3_weight", "ia3_on_input"}
LORA = {"down", "up", "mid"}
LOHA = {"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2"}
LOKR = {"lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2"}
ONE_NUMBER = {"alpha", "scalar"}
MAGNITUDES = {"peft_magnitude", "dora_scale"}


def check_parts(name: str, parts: Parts, shape: torch.Size, *, max_rank: int) -> None:
    """Check that the parts of a layer whose base weight is of `shape` [out, in…] fit it and each other.

    Only shapes are looked at: the parts may be of torch's meta device. Raises UnusableAdapter with the layer's name.
    """
    _require_one_algorithm(name, parts)
    if parts.keys() <= IA3:
        _require_ia3(name, parts, shape)
        return
    down, _, _ = _low_rank(name, parts, shape)
    if down.shape[0] > max_rank:
        raise UnusableAdapter(f"rank {down.shape[0]} ({name}), this server takes {max_rank}")
    for part in ONE_NUMBER & parts.keys():
        if parts[part].numel() != 1:
            raise UnusableAdapter(f"{name}: {part} is not one number, its shape is {tuple(parts[part].shape)}")
    for part in MAGNITUDES & parts.keys():
        _per_output(name, parts[part], shape, by_lycoris=part == "dora_scale")


def module_weights(
    name: str, parts: Parts, base: Tensor, *, alpha: float | None, rank_stabilized: bool
) -> ModuleWeights:
    """Return the change of a layer whose base weight is `base` [out, in…], by parts that passed `check_parts`.

    `alpha` None means the file's own, else its dimension. Raises UnusableAdapter for numbers that are not finite.
    """
    if parts.keys() <= IA3:
        return _ia3(name, parts, base)
    down, up, dimension = _low_rank(name, parts, base.shape)
    if "scalar" in parts:
        up = up * parts["scalar"].float()
    if "alpha" in parts:
        alpha = float(parts["alpha"])
    made = ModuleWeights(down, up, _scaling(alpha, dimension, rank_stabilized))
    if "peft_magnitude" in parts:
        made = made._replace(magnitude=_per_output(name, parts["peft_magnitude"], base.shape, by_lycoris=False))
    if "dora_scale" in parts:
        made = made._replace(slope=_lycoris_dora(name, parts["dora_scale"], base, made), unscaled=True)
    _require_finite(name, made)
    return made


def _scaling(alpha: float | None, dimension: int | None, rank_stabilized: bool) -> float:
    if dimension is None or alpha is None:
        alpha = dimension = dimension or 1
    return alpha / (dimension**0.5 if rank_stabilized else dimension)


def _require_one_algorithm(name: str, parts: Parts) -> None:
    """What one algorithm does not use would be left out without a word."""
    used = next((each for each in (LOHA, LOKR, LORA) if each & parts.keys()), IA3)
    others = parts.keys() - used - (set() if used is IA3 else ONE_NUMBER | MAGNITUDES)
    whole = {f"{side}_{part}" for side in ("lokr_w1", "lokr_w2") if side in parts for part in "ab"}
    if used is IA3 and "ia3_weight" not in parts:
        raise UnusableAdapter(f"{name}: has {' and '.join(sorted(parts))} but no weights that they belong to")
    if others or whole & parts.keys() or parts.keys() >= MAGNITUDES:
        raise UnusableAdapter(f"{name}: holds parts of two algorithms: {', '.join(sorted(parts))}")


def _low_rank(name: str, parts: Parts, shape: torch.Size) -> LowRank:
    read = _loha if LOHA & parts.keys() else _lokr if LOKR & parts.keys() else _lora
    try:
        return read(name, parts, shape)
    except (RuntimeError, IndexError) as error:  # torch raises these for shapes that do not fit each other
        shapes = ", ".join(f"{part} {tuple(tensor.shape)}" for part, tensor in sorted(parts.items()))
        raise UnusableAdapter(f"{name}: its tensors do not fit each other: {shapes}") from error


def _lora(name: str, parts: Parts, shape: torch.Size) -> LowRank:
    _require(name, parts, "down", "up")
    down, up = parts["down"].float(), parts["up"].float()
    dimension = down.shape[0]
    if "mid" in parts:  # Tucker's form is a 1×1 convolution, one with the kernel, and a 1×1
        down = torch.einsum("i j ..., j c -> i c ...", parts["mid"].float(), down.flatten(1))
    rank = down.shape[0]
    if down[0].numel() == shape[1:].numel():
        down = down.reshape(rank, *shape[1:])  # a linear may be written as a 1×1 convolution, and the other way round
    if up.flatten(1).shape != (shape[0], rank) or down.shape[1:] != shape[1:]:
        raise UnusableAdapter(
            f"{name}: down {tuple(down.shape)} and up {tuple(up.shape)} do not fit a layer of {tuple(shape)}"
        )
    return down, up.flatten(1), dimension


def _loha(name: str, parts: Parts, shape: torch.Size) -> LowRank:
    """(w1_a·w1_b) ∘ (w2_a·w2_b): the product of two matrices, element by element, has rank r1·r2 at most."""
    _require(name, parts, "hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
    first = _factors(parts, "hada_w1_a", "hada_w1_b", "hada_t1")
    second = _factors(parts, "hada_w2_a", "hada_w2_b", "hada_t2")
    up = (first[0][:, :, None] * second[0][:, None, :]).flatten(1)
    if first[1].shape[1:] != second[1].shape[1:]:
        raise UnusableAdapter(f"{name}: the two products of a LoHa differ in shape")
    down = (first[1][:, None] * second[1][None]).flatten(0, 1)
    return _fitted(name, "LoHa", down, up, shape, parts["hada_w1_b"].shape[0])


def _lokr(name: str, parts: Parts, shape: torch.Size) -> LowRank:
    """w1 ⊗ w2: the Kronecker product has the product of their ranks."""
    first = _kronecker_side(name, parts, "lokr_w1")
    second = _kronecker_side(name, parts, "lokr_w2")
    up = torch.einsum("a p, o q -> a o p q", first[0], second[0]).flatten(0, 1).flatten(1)
    down = torch.einsum("p b, q i ... -> p q b i ...", first[1], second[1]).flatten(0, 1).flatten(1, 2)
    # both sides whole: LyCORIS scales by one, whatever the file's alpha says
    dimension = next((parts[part].shape[0] for part in ("lokr_w1_b", "lokr_w2_b") if part in parts), None)
    return _fitted(name, "LoKr", down, up, shape, dimension)


def _kronecker_side(name: str, parts: Parts, side: str) -> tuple[Tensor, Tensor]:
    """Return up [out, rank] and down [rank, in…] of one factor; the identity splits a whole one."""
    if side in parts:
        whole = parts[side].float()
        out, width = whole.shape[0], whole[0].numel()
        if out <= width:
            return torch.eye(out, device=whole.device), whole
        return whole.flatten(1), torch.eye(width, device=whole.device).view(width, *whole.shape[1:])
    _require(name, parts, f"{side}_a", f"{side}_b")
    return _factors(parts, f"{side}_a", f"{side}_b", "lokr_t2" if side == "lokr_w2" else "")


def _factors(parts: Parts, a: str, b: str, core: str) -> tuple[Tensor, Tensor]:
    """up [out, rank] and down [rank, in…] of a·b, or of the Tucker core t[i, j, …]·a[i, out]·b[j, in]."""
    if core in parts:
        down = torch.einsum("i j ..., j c -> i c ...", parts[core].float(), parts[b].float())
        return parts[a].float().T, down
    return parts[a].float(), parts[b].float()


def _fitted(name: str, kind: str, down: Tensor, up: Tensor, shape: torch.Size, dimension: int | None) -> LowRank:
    rank = down.shape[0]
    if up.shape != (shape[0], rank) or down[0].numel() != shape[1:].numel():
        raise UnusableAdapter(
            f"{name}: a {kind} of {tuple(up.shape)} by {tuple(down.shape)} does not fit {tuple(shape)}"
        )
    return down.reshape(rank, *shape[1:]), up, dimension


def _require_ia3(name: str, parts: Parts, shape: torch.Size) -> None:
    numbers = parts["ia3_weight"].numel()
    if (on_input := parts.get("ia3_on_input")) is not None and on_input.numel() != 1:
        raise UnusableAdapter(f"{name}: on_input is not one flag")
    if numbers not in (shape[0], shape[1:].numel()):
        raise UnusableAdapter(f"{name}: IA³ of {numbers} numbers does not fit {shape[0]} outputs")


def _ia3(name: str, parts: Parts, base: Tensor) -> ModuleWeights:
    """Return a factor 1 + scale·w per output, on the product alone and not on the bias."""
    if "ia3_on_input" in parts and bool(parts["ia3_on_input"]):
        raise UnusableAdapter(f"{name}: IA³ on a layer's inputs is not supported, only on its outputs")
    slope = parts["ia3_weight"].float().flatten()
    if slope.shape[0] != base.shape[0]:
        raise UnusableAdapter(f"{name}: IA³ of {slope.shape[0]} numbers does not fit {base.shape[0]} outputs")
    made = ModuleWeights(torch.zeros(1, *base.shape[1:]), torch.zeros(base.shape[0], 1), 1.0, slope=slope)
    _require_finite(name, made)
    return made


def _lycoris_dora(name: str, dora_scale: Tensor, base: Tensor, made: ModuleWeights) -> Tensor:
    """Return m / ‖W + BA‖ − 1 per output: LyCORIS scales this gain, and keeps BA whole at weights but 0."""
    magnitude = _per_output(name, dora_scale, base.shape, by_lycoris=True)
    changed = base.detach().flatten(1).float().cpu() + made.up @ made.down.flatten(1) * made.scaling
    return magnitude / (changed.norm(dim=1) + torch.finfo(torch.float32).eps) - 1


def _per_output(name: str, magnitude: Tensor, shape: torch.Size, *, by_lycoris: bool) -> Tensor:
    """DoRA's m as [out].

    PEFT writes [out], and of a convolution [1, out, 1, 1]; LyCORIS writes [out, 1, …].
    LyCORIS can also keep one number per input, [1, in, …], which is another formula.
    """
    per_input = by_lycoris and magnitude.dim() > 1 and magnitude.shape[0] == 1 and shape[0] != 1
    if magnitude.numel() != shape[0] or per_input:
        raise UnusableAdapter(
            f"{name}: a DoRA scale of {tuple(magnitude.shape)} is not one number per output ({shape[0]})"
        )
    return magnitude.float().flatten()


def _require(name: str, parts: Parts, *needed: str) -> None:
    missing = [part for part in needed if part not in parts]
    if missing:
        wanted = ("both " if len(needed) == 2 else "") + " and ".join(needed)
        raise UnusableAdapter(f"{name}: has {' and '.join(sorted(parts))} but needs {wanted}")


def _require_finite(name: str, made: ModuleWeights) -> None:
    numbers = [made.down, made.up, torch.tensor(made.scaling)]
    numbers += [tensor for tensor in (made.magnitude, made.slope) if tensor is not None]
    if not all(bool(tensor.isfinite().all()) for tensor in numbers):
        raise UnusableAdapter(f"{name}: holds numbers that are not finite")

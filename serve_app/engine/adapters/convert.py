"""One layer's parts, in any of the algorithms that trainers write, as one low-rank change and a gain.

Sources: LoRA (Hu et al. 2021), DoRA (Liu et al. 2024), LoHa and LoKr (Yeh et al. 2023, LyCORIS), IA³ (Liu et al. 2022).
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from serve_app.engine.adapter_slots import ModuleWeights
from serve_app.engine.adapters.explain import AS_LORA
from serve_app.engine.adapters.layer_table import UnusableAdapter
from serve_app.engine.lora_layers import Factors

Parts = Mapping[str, Tensor]
Read = tuple[ModuleWeights, int | None]
"""A change without its scaling, and the dimension that alpha is divided by; None where the writer scales by one."""
IA3 = {"ia3_weight", "ia3_on_input"}
LORA = {"down", "up", "mid"}
LOHA = {"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2"}
DIFFERENCE = {"diff"}
LOKR = {"lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2"}
ONE_NUMBER = {"alpha", "scalar"}
WHOLE_NUMBERS = {"alpha", "ia3_on_input"}
"""Trainers write these as integers and flags, too; all other parts are weights."""
ROWS = 256
"""A large weight is converted by this many rows at a time, which stay in a processor's cache."""
ROUNDING = 0.01
"""The numbers of one change, written twice in 16 bits, differ by less than this part of the largest."""
MAGNITUDES = {"peft_magnitude", "dora_scale"}


def check_parts(name: str, parts: Parts, shape: torch.Size, *, max_rank: float) -> None:
    """Check that the parts of a layer whose base weight is of `shape` [out, in…] fit it and each other.

    Only shapes are looked at: the parts may be of torch's meta device. The rank of several layers at once says nothing
    of that of each: their `max_rank` is infinite. Raises UnusableAdapter with the layer's name.
    """
    _require_one_algorithm(name, parts)
    for part in parts.keys() - WHOLE_NUMBERS:
        if not parts[part].is_floating_point():
            kind = str(parts[part].dtype).removeprefix("torch.")
            raise UnusableAdapter(f"{name}: {part} is quantized as {kind}: save it in floating point")
    if parts.keys() <= IA3:
        _require_ia3(name, parts, shape)
        return
    made, dimension = _read(name, parts, shape)
    if DIFFERENCE & parts.keys() and made.rank > max_rank:
        raise UnusableAdapter(
            f"full-weight difference weights of a layer as wide as {name} are not supported, {AS_LORA}"
        )
    own = f" ({_algorithm(parts)} of {f'dimension {dimension}' if dimension else 'two whole factors'})"
    require_size(name, made, max_rank, own)
    for part in ONE_NUMBER & parts.keys():
        if parts[part].numel() != 1:
            raise UnusableAdapter(f"{name}: {part} is not one number, its shape is {tuple(parts[part].shape)}")
    for part in MAGNITUDES & parts.keys():
        _gained_side(name, part, parts[part], shape)


def require_size(name: str, made: ModuleWeights, max_rank: float, own: str = "") -> None:
    rank, what, advice = made.size_rank, f"rank {made.rank}{own}", "train a smaller one"
    if made.factors is not None:
        outer, inner = ("×".join(map(str, each.shape)) for each in (made.factors.outer, made.factors.inner))
        what = f"LoKr's factors {outer} and {inner}, as large as rank {rank},"
        advice = "train it with a larger lokr_factor, or with -1"
    if rank > max_rank:
        raise UnusableAdapter(f"{what} of {name}, this server takes {max_rank}: {advice}")


def module_weights(
    name: str, parts: Parts, bases: Sequence[Tensor], *, alpha: float | None, rank_stabilized: bool
) -> list[ModuleWeights]:
    """Return the change of each layer that the parts are for, by parts that passed `check_parts`.

    `bases` are the layers' weights [out, in…], whose outputs are in turn those of the parts. `alpha` None means the
    file's own, else its dimension. Raises UnusableAdapter for numbers that are not finite.
    """
    outputs = [base.shape[0] for base in bases]
    made = _whole_change(name, parts, bases, torch.Size((sum(outputs), *bases[0].shape[1:])), alpha, rank_stabilized)
    _require_finite(name, made)
    return (
        [made] if len(bases) == 1 else [_outputs_of(made, *each) for each in pairwise(accumulate(outputs, initial=0))]
    )


def _whole_change(
    name: str, parts: Parts, bases: Sequence[Tensor], shape: torch.Size, alpha: float | None, rank_stabilized: bool
) -> ModuleWeights:
    if parts.keys() <= IA3:
        return _ia3(name, parts, shape)
    made, dimension = _read(name, parts, shape)
    if "alpha" in parts:
        alpha = float(parts["alpha"])
    scalar = float(parts["scalar"]) if "scalar" in parts else 1.0
    made = made._replace(scaling=_scaling(alpha, dimension, rank_stabilized) * scalar)
    if "dora_scale" in parts and parts["dora_scale"].dim() > 1:
        return _lycoris_dora(name, parts["dora_scale"], bases, made)
    for magnitude in (parts[part] for part in MAGNITUDES & parts.keys()):
        # diffusers' converter calls PEFT's magnitudes dora_scale, and leaves them [out]
        made = made._replace(magnitude=magnitude.float().flatten())
    return made


def _outputs_of(made: ModuleWeights, first: int, end: int) -> ModuleWeights:
    """Return what a change does to these outputs, at the rank that it has there.

    Columns of zeros are left out: a trainer that joins the changes of several layers pads each of them with zeros.
    """
    made = made.outputs(first, end)
    used = made.up.any(0)
    used[:1] |= not used.any()
    down, up = made.down[used], made.up[:, used]
    if _is_outsize(down.shape[0], torch.Size((end - first, *down.shape[1:]))):
        up, down = _by_identity(_product(up, down))
    return made._replace(down=down, up=up)


def is_same_change(one: ModuleWeights, other: ModuleWeights) -> bool:
    """Return whether two changes of a layer differ by rounding alone: some trainers write one under the names of two
    programs."""
    kinds = [[each.magnitude, each.slope, each.input_slope] for each in (one, other)]
    return one.unscaled == other.unscaled and all(
        (first is None) == (second is None)
        and (first is None or second is None or bool((first - second).abs().max() <= ROUNDING * first.abs().max()))
        for first, second in zip([*kinds[0], one.change], [*kinds[1], other.change], strict=True)
    )


def _scaling(alpha: float | None, dimension: int | None, rank_stabilized: bool) -> float:
    if dimension is None or alpha is None:
        alpha = dimension = dimension or 1
    return alpha / (dimension**0.5 if rank_stabilized else dimension)


def _require_one_algorithm(name: str, parts: Parts) -> None:
    """Raise UnusableAdapter for parts of two algorithms, since those of one would be left out without a word."""
    used = next((each for each in (LOHA, LOKR, LORA, DIFFERENCE) if each & parts.keys()), IA3)
    others = parts.keys() - used - (set() if used is IA3 else ONE_NUMBER | MAGNITUDES)
    whole = {f"{side}_{part}" for side in ("lokr_w1", "lokr_w2") if side in parts for part in "ab"}
    if used is IA3 and "ia3_weight" not in parts:
        raise UnusableAdapter(f"{name}: has {' and '.join(sorted(parts))} but no weights that they belong to")
    if others or whole & parts.keys() or parts.keys() >= MAGNITUDES:
        raise UnusableAdapter(f"{name}: holds parts of two algorithms: {', '.join(sorted(parts))}")


def _algorithm(parts: Parts) -> str:
    kinds = {"LoHa": LOHA, "LoKr": LOKR, "difference": DIFFERENCE}
    return next((kind for kind, own in kinds.items() if own & parts.keys()), "LoRA")


def _read(name: str, parts: Parts, shape: torch.Size) -> Read:
    """Return the change at its own rank, or at the layer's smaller side where that is less, or as LoKr's factors."""
    read = {"LoHa": _loha, "LoKr": _lokr, "LoRA": _lora, "difference": _difference}[_algorithm(parts)]
    try:
        return read(name, parts, shape)
    except (RuntimeError, IndexError) as error:  # torch raises these for shapes that do not fit each other
        shapes = ", ".join(f"{part} {tuple(tensor.shape)}" for part, tensor in sorted(parts.items()))
        raise UnusableAdapter(f"{name}: its tensors do not fit each other: {shapes}") from error


def _lora(name: str, parts: Parts, shape: torch.Size) -> Read:
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
    if _is_outsize(rank, shape):
        up, down = _by_identity(_product(up.flatten(1), down))
    return ModuleWeights(down, up.flatten(1), 1.0), dimension


def _difference(name: str, parts: Parts, shape: torch.Size) -> Read:
    """Return a whole change, as ComfyUI's trainer writes it for layers that are too narrow for a LoRA."""
    up, down = _by_identity(parts["diff"].float())
    return _fitted(name, "difference", down, up, shape, None)


def _loha(name: str, parts: Parts, shape: torch.Size) -> Read:
    """(w1_a·w1_b) ∘ (w2_a·w2_b): the product of two matrices, element by element, has rank r1·r2 at most."""
    _require(name, parts, "hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
    first = _factors(parts, "hada_w1_a", "hada_w1_b", "hada_t1")
    second = _factors(parts, "hada_w2_a", "hada_w2_b", "hada_t2")
    if first[1].shape[1:] != second[1].shape[1:] or first[0].shape[0] != second[0].shape[0]:
        raise UnusableAdapter(f"{name}: the two products of a LoHa differ in shape")
    if _is_outsize(first[1].shape[0] * second[1].shape[0], shape):
        up, down = _by_identity(_product(*first) * _product(*second))
    else:
        up = (first[0][:, :, None] * second[0][:, None, :]).flatten(1)
        down = (first[1][:, None] * second[1][None]).flatten(0, 1)
    return _fitted(name, "LoHa", down, up, shape, parts["hada_w1_b"].shape[0])


def _lokr(name: str, parts: Parts, shape: torch.Size) -> Read:
    """w1 ⊗ w2: the Kronecker product has the product of their ranks. Linear layers keep both where that is faster."""
    first = _kronecker_side(name, parts, "lokr_w1")
    second = _kronecker_side(name, parts, "lokr_w2")
    # both sides whole: LyCORIS scales by one, whatever the file's alpha says
    dimension = next((parts[part].shape[0] for part in ("lokr_w1_b", "lokr_w2_b") if part in parts), None)
    rank = min(first[1].shape[0] * second[1].shape[0], shape[0], shape[1:].numel())
    outer, inner = (
        parts[side].float() if side in parts else _product(*each)
        for side, each in (("lokr_w1", first), ("lokr_w2", second))
    )
    sides = outer.shape[0] * inner.shape[0], outer.shape[-1] * inner[0].numel()
    if outer.dim() == 2 and sides == (shape[0], shape[1:].numel()):
        factors = Factors(outer, inner.flatten(1))
        made = ModuleWeights(outer.new_empty(0, *shape[1:]), outer.new_empty(shape[0], 0), 1.0, factors=factors)
        if shape[2:].numel() == 1 and made.work_rank < rank:
            return made, dimension
    if _is_outsize(first[1].shape[0] * second[1].shape[0], shape):
        change = torch.einsum("a b, o i ... -> a o b i ...", outer, inner)
        up, down = _by_identity(change.flatten(0, 1).flatten(1, 2))
    else:
        up = torch.einsum("a p, o q -> a o p q", first[0], second[0]).flatten(0, 1).flatten(1)
        down = torch.einsum("p b, q i ... -> p q b i ...", first[1], second[1]).flatten(0, 1).flatten(1, 2)
    return _fitted(name, "LoKr", down, up, shape, dimension)


def _kronecker_side(name: str, parts: Parts, side: str) -> tuple[Tensor, Tensor]:
    """Return up [out, rank] and down [rank, in…] of one factor; the identity splits a whole one."""
    if side in parts:
        return _by_identity(parts[side].float())
    _require(name, parts, f"{side}_a", f"{side}_b")
    return _factors(parts, f"{side}_a", f"{side}_b", "lokr_t2" if side == "lokr_w2" else "")


def _by_identity(whole: Tensor) -> tuple[Tensor, Tensor]:
    """Return a whole change [out, in…] as up [out, rank] and down [rank, in…], one of which is the identity."""
    out, width = whole.shape[0], whole[0].numel()
    if out <= width:
        return torch.eye(out, device=whole.device), whole
    return whole.flatten(1), torch.eye(width, device=whole.device).view(width, *whole.shape[1:])


def _product(up: Tensor, down: Tensor) -> Tensor:
    return (up @ down.flatten(1)).view(up.shape[0], *down.shape[1:])


def _is_outsize(rank: int, shape: torch.Size) -> bool:
    """Return whether the layer's smaller side is less than a rank, and so enough for the same change."""
    return rank > min(shape[0], shape[1:].numel())


def _factors(parts: Parts, a: str, b: str, core: str) -> tuple[Tensor, Tensor]:
    """up [out, rank] and down [rank, in…] of a·b, or of the Tucker core t[i, j, …]·a[i, out]·b[j, in]."""
    if core in parts:
        down = torch.einsum("i j ..., j c -> i c ...", parts[core].float(), parts[b].float())
        return parts[a].float().T, down
    return parts[a].float().flatten(1), parts[b].float()  # OneTrainer's are convolutions: [out, rank, 1, 1]


def _fitted(name: str, kind: str, down: Tensor, up: Tensor, shape: torch.Size, dimension: int | None) -> Read:
    rank = down.shape[0]
    if up.shape != (shape[0], rank) or down[0].numel() != shape[1:].numel():
        raise UnusableAdapter(
            f"{name}: a {kind} of {tuple(up.shape)} by {tuple(down.shape)} does not fit {tuple(shape)}"
        )
    return ModuleWeights(down.reshape(rank, *shape[1:]), up, 1.0), dimension


def _require_ia3(name: str, parts: Parts, shape: torch.Size) -> None:
    numbers = parts["ia3_weight"].numel()
    if (on_input := parts.get("ia3_on_input")) is not None and on_input.numel() != 1:
        raise UnusableAdapter(f"{name}: on_input is not one flag")
    if numbers not in shape[:2]:
        raise UnusableAdapter(f"{name}: IA³ of {numbers} numbers does not fit {shape[0]} outputs or {shape[1]} inputs")


def _ia3(name: str, parts: Parts, shape: torch.Size) -> ModuleWeights:
    """Return a factor 1 + scale·w per input, or per output, on the product alone and not on the bias."""
    numbers = parts["ia3_weight"].float().flatten()
    side = 1 if bool(parts.get("ia3_on_input", False)) else 0
    if numbers.shape[0] != shape[side]:
        each = ("outputs", "inputs")[side]
        raise UnusableAdapter(f"{name}: IA³ of {numbers.shape[0]} numbers does not fit {shape[side]} {each}")
    made = ModuleWeights(torch.zeros(1, *shape[1:]), torch.zeros(shape[0], 1), 1.0)
    return made._replace(input_slope=numbers) if side else made._replace(slope=numbers)


def _lycoris_dora(name: str, dora_scale: Tensor, bases: Sequence[Tensor], made: ModuleWeights) -> ModuleWeights:
    """Gain m / ‖W + BA‖ per output or per input: LyCORIS scales this gain, and keeps BA whole at weights but 0."""
    side = _gained_side(name, "dora_scale", dora_scale, torch.Size((made.up.shape[0], *made.down.shape[1:])))
    slope = dora_scale.float().flatten() / (_norms(bases, made, side) + torch.finfo(torch.float32).eps) - 1
    made = made._replace(unscaled=True)
    return made._replace(input_slope=slope) if side else made._replace(slope=slope)


def _norms(bases: Sequence[Tensor], made: ModuleWeights, side: int) -> Tensor:
    """Return ‖W + BA‖ per output or per input, over few rows at a time; 1 where W is of torch's meta device."""
    if bases[0].is_meta:
        return torch.ones(())
    squares: list[Tensor] = []
    first = 0
    for rows in (rows for base in bases for rows in base.detach().split(ROWS)):
        changed = rows.float().cpu() + made.outputs(first, first + len(rows)).change
        squares.append(changed.transpose(0, side).flatten(1).square().sum(1))
        first += len(rows)
    return (torch.stack(squares).sum(0) if side else torch.cat(squares)).sqrt()


def _gained_side(name: str, part: str, magnitude: Tensor, shape: torch.Size) -> int:
    """Return 0 where DoRA's m has a number per output, 1 where it has one per input.

    PEFT writes [out], and of a convolution [1, out, 1, 1]; LyCORIS writes [out, 1, …] or [1, in, …].
    """
    side = int(part == "dora_scale" and magnitude.dim() > 1 and magnitude.shape[0] == 1 != shape[0])
    if magnitude.numel() != shape[side]:
        raise UnusableAdapter(
            f"{name}: a DoRA scale of {tuple(magnitude.shape)} is not one number per output or input of {tuple(shape)}"
        )
    return side


def _require(name: str, parts: Parts, *needed: str) -> None:
    missing = [part for part in needed if part not in parts]
    if missing:
        wanted = ("both " if len(needed) == 2 else "") + " and ".join(needed)
        raise UnusableAdapter(f"{name}: has {' and '.join(sorted(parts))} but needs {wanted}")


def _require_finite(name: str, made: ModuleWeights) -> None:
    numbers = [made.down, made.up, torch.tensor(made.scaling)]
    numbers += [tensor for tensor in (made.magnitude, made.slope, made.input_slope) if tensor is not None]
    numbers += [] if made.factors is None else [made.factors.outer, made.factors.inner]
    if not all(bool(tensor.isfinite().all()) for tensor in numbers):
        raise UnusableAdapter(f"{name}: holds numbers that are not finite")

"""The noise schedule that the UNet is trained with and that the exported folder carries."""

from diffusers import DDIMScheduler


def noise_schedule() -> DDIMScheduler:
    """Return the plain linear schedule, which ends at 1/157 of the signal.

    So no background colour leaks into the starting noise.
    """
    return DDIMScheduler(
        beta_schedule="linear",
        beta_start=0.0001,
        beta_end=0.02,
        prediction_type="v_prediction",
        clip_sample=False,
        set_alpha_to_one=True,
        timestep_spacing="trailing",
        steps_offset=1,
    )

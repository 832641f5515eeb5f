import re

from serve_app.domain.jobs import JobKind, new_image_id, new_job_id


def test_ids_are_a_prefix_and_128_random_bits_in_lower_case_base32() -> None:
    made = [new_job_id(JobKind.GENERATION), new_job_id(JobKind.UPSCALE), new_image_id()]
    for name, prefix in zip(made, ("gen", "up", "img"), strict=True):
        assert re.fullmatch(prefix + "_[a-z2-7]{26}", name)
    assert len({new_job_id(JobKind.GENERATION) for _ in range(1000)}) == 1000

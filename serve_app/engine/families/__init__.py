"""What an engine needs to know of an architecture: how it reads a prompt, one denoiser call, how latents become pixels."""

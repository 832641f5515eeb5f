"""The pages in a real browser: Chromium, driven by Playwright, before the real application and the pocket model."""

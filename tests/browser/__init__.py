"""Tests of the pages in Chromium, driven by Playwright, on the real application and pocket model."""

"""Open a page in headless Chromium and see what its scripts made of it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH: pages are not opened")
QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--virtual-time-budget=3000",
)


def opened(page: Path, profile: Path, width: int = 1280, probe: str = "") -> str:
    """The page's DOM after its scripts, and after `probe`, a script of the test's own, have run."""
    copy = page.with_name("probed-" + page.name)
    copy.write_text(page.read_text().replace("</body>", f"<script>{probe}</script></body>"))
    command = [str(CHROMIUM), *QUIET, f"--user-data-dir={profile}", f"--window-size={width},1400", "--dump-dom"]
    done = subprocess.run([*command, copy.as_uri()], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout

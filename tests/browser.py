"""A headless Chromium for tests: opens a page in a given light and width, reads its console, takes screenshots."""

from __future__ import annotations

import base64
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["MISSING", "Browser", "chromium"]

_BINARY = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_DRIVER = shutil.which("chromedriver")

MISSING = (
    None if _BINARY and _DRIVER else "no chromium with chromedriver here (apt-get install chromium chromium-driver)"
)
"""Why no browser can be started; None where one can."""


class Browser:
    """One window."""

    def __init__(self, driver: Any, downloads: Path) -> None:
        self.driver = driver
        self.downloads = downloads

    def open(self, address: Path | str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Opens a file or an address, as if it were the first; returns when it is loaded."""
        self.driver.get("about:blank")
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": scheme})
        self.resize(width, height)
        self.driver.get(address.resolve().as_uri() if isinstance(address, Path) else address)

    def resize(self, width: int, height: int) -> None:
        """Makes the page so wide, in CSS pixels, as a phone would below 500."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script in the page returns."""
        return self.driver.execute_script(script, *arguments)

    def wait(self, condition: str, seconds: float = 60) -> None:
        """Waits for a JavaScript expression to be true."""
        self.until(lambda: self.run(f"return Boolean({condition})"), condition, seconds)

    def until(self, condition: Callable[[], object], what: str, seconds: float = 60) -> None:
        """Waits for a condition."""
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                raise AssertionError(f"not within {seconds:g} s: {what}\n{self.run('return document.body.innerText')}")
            time.sleep(0.05)

    def errors(self) -> list[str]:
        """What the console holds of errors and violations since it was last asked; warnings are left out."""
        return [
            f"{entry['source']}: {entry['message']}"
            for entry in self.driver.get_log("browser")
            if entry["level"] == "SEVERE"
        ]

    def screenshot(self, path: Path, *, scale: float = 1) -> None:
        """Writes what is seen, so many times its size in CSS pixels."""
        width, height = self.run("return [innerWidth, innerHeight]")
        at = self.run("return [scrollX, scrollY]")
        clip = {"x": at[0], "y": at[1], "width": width, "height": height, "scale": scale}
        options = {"format": "png", "clip": clip, "optimizeForSpeed": False}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self.driver.execute_cdp_cmd("Page.captureScreenshot", options)["data"]))


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """Starts a browser that reaches nothing but this machine; ends it with the block.

    Args:
        folder: An empty folder for its profile and, in `downloads`, for what pages save.
    """
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(_BINARY)
    for flag in (
        "--headless=new",
        "--no-sandbox",  # root in a container has no user namespaces
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--force-color-profile=srgb",
        f"--user-data-dir={folder / 'profile'}",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE localhost, EXCLUDE 127.0.0.1",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=_DRIVER))
    try:
        target = {"behavior": "allow", "downloadPath": str(folder / "downloads")}
        driver.execute_cdp_cmd("Browser.setDownloadBehavior", target)
        yield Browser(driver, folder / "downloads")
    finally:
        driver.quit()

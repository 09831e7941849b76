"""The stand-ins compute on the host's memory."""

import pytest
import torch

from tokenspeed_kernel.platform import PlatformInfo


@pytest.fixture(autouse=True)
def _on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def host(platform: PlatformInfo) -> torch.device:
        return torch.device("cpu")

    monkeypatch.setattr("tokenspeed_kernel.numerics.verify.device_of", host)

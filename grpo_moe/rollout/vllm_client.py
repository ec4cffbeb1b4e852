"""What the vLLM engine says over HTTP."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from typing import Any

from grpo_moe.text import clean


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """urllib would take the API key along, to any host."""

    def redirect_request(self, *_: Any) -> None:
        return None


@dataclass(frozen=True)
class Client:
    """JSON over HTTP, straight to the server whatever proxies the environment names.

    Raises:
        ConnectionError, TimeoutError, PermissionError, ValueError, RuntimeError: of a call, naming the server.
    """

    url: str
    timeout: float
    api_key: str | None = field(repr=False)

    def get(self, path: str) -> dict[str, Any]:
        """The answer to a GET."""
        return self._call("GET", path)

    def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The answer to a POST of ``body``."""
        return self._call("POST", path, b"" if body is None else json.dumps(body).encode())

    def _call(self, method: str, path: str, data: bytes | None = None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)
            with opener.open(request, timeout=self.timeout) as x:
                return json.load(x)
        except urllib.error.HTTPError as error:
            raise self._refusal(path, error) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                raise TimeoutError(
                    f"timeout must be longer than {path} takes at {self.url}, got {self.timeout} seconds; raise it, or "
                    "see the log of the server"
                ) from error
            raise ConnectionError(
                f"url must be that of a running vLLM server, got {self.url}: {reason}; start it with vllm serve, or "
                "see its log"
            ) from error

    def _refusal(self, path: str, error: urllib.error.HTTPError) -> Exception:
        if error.code in (401, 403):
            given = "another" if self.api_key else "none"
            return PermissionError(
                f"api_key must be that of the server at {self.url}, got {given} ({error.code}); pass it or set "
                "VLLM_API_KEY"
            )
        if error.code == 404 and not path.startswith("/v1/"):
            return ValueError(
                f"the server at {self.url} must have {path}, got 404; start vLLM 0.32 or later with "
                "VLLM_SERVER_DEV_MODE=1"
            )
        text = clean(error.read(10_000).decode(errors="replace"), 500)
        if "Out of range float values" in text:  # its JSON has no NaN: an expert that never came is whatever was there
            return RuntimeError(
                f"log-probabilities at {self.url} must be finite, got NaN or infinity; its weights are incomplete or "
                "wrongly mapped: do not train on its rollouts"
            )
        if error.code == 400:
            return ValueError(f"{path} must suit the model served at {self.url}, got {text}; serve this model")
        return RuntimeError(f"{path} must succeed at {self.url}, got {error.code} {text}; see the server's log")


def is_address(url: object) -> bool:
    """Whether it is http:// or https:// with a host."""
    if not isinstance(url, str) or not url.isprintable() or " " in url:
        return False
    try:
        parts = urllib.parse.urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0  # port raises
    except ValueError:
        return False

"""How a model's weights reach a vLLM server: NCCL broadcasts to its workers, or files in a folder that it reads."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file

from grpo_moe.checks import check_int, require

from .weights import buckets, published_weights


class Server(Protocol):
    """What a transfer needs of the HTTP client."""

    def get(self, path: str) -> dict[str, Any]:
        """The JSON answer to a GET of this path."""

    def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The JSON answer to a POST of this body."""


class NCCLTransfer:
    """vLLM's own NCCL backend: packed buckets from the GPU of this process to every worker of the server.

    The server runs with ``--weight-transfer-config '{"backend": "nccl"}'``; vLLM must be installed here too, and this
    process must hold another GPU than the server. A worker that fails to load a bucket stops listening, and NCCL does
    not notice: look at the server's log when a transfer hangs.

    Args:
        address: of this machine, as the server's machines reach it.
        bucket_bytes: of one broadcast; both sides hold two.
        dtype: of the weights with two dimensions or more on the way; None sends each as the model holds it.
    """

    def __init__(self, *, address: str = "127.0.0.1", bucket_bytes: int = 2**30, dtype: torch.dtype | None = None):
        if not torch.cuda.is_available():
            raise ValueError("transfer must be a FolderTransfer without a CUDA GPU, got NCCLTransfer; NCCL needs one")
        try:
            import vllm.distributed.weight_transfer.nccl_engine as nccl
        except ImportError as error:
            raise ValueError(
                "transfer must be a FolderTransfer without vLLM 0.32 or later in this environment, got NCCLTransfer; "
                "pip install 'grpo-moe[vllm]'"
            ) from error
        _check_buckets(bucket_bytes, dtype)
        self.nccl, self.address, self.bucket_bytes, self.dtype = nccl, address, bucket_bytes, dtype
        self._engine: Any = None

    def send(self, server: Server, model: torch.nn.Module) -> None:
        """Sends all weights and returns once the server has loaded them."""
        source = _Source(model, self.dtype)
        device = next(model.parameters()).device
        with torch.accelerator.device_index(device.index):
            if self._engine is None:
                self._engine = self._connect(server, source)
            self._engine.source = source
            self._engine.send_weights()

    def _connect(self, server: Server, source: _Source) -> Any:
        info = self.nccl.NCCLTrainerInitInfo(
            rank=0,
            master_address=self.address,
            master_port=_free_port(),
            world_size=1 + server.get("/get_world_size")["world_size"],
            packed=True,
            packed_buffer_size_bytes=self.bucket_bytes,
        )
        trainer = self.nccl.NCCLTrainerWeightTransferEngine
        return trainer.trainer_init(info, client=_Client(server), source=source)


class FolderTransfer:
    """Safetensors files, a bucket each, in a folder that this process and the server's workers share.

    It works with every build of vLLM: the workers' own ``reload_weights`` reads the folder. A folder in memory, as
    below /dev/shm, saves the disk.

    Args:
        folder: made if missing; the ``*.safetensors`` in it are replaced at every transfer.
        server_folder: the same folder as the server's machines name it; by default the same name.
        bucket_bytes: of one file, and of the copy on the CPU while it is written.
        dtype: as in :class:`NCCLTransfer`.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        server_folder: str | None = None,
        bucket_bytes: int = 2**30,
        dtype: torch.dtype | None = None,
    ):
        given = isinstance(folder, str | Path) and str(folder) and "\0" not in str(folder)
        require(bool(given), "folder", "the path of a folder", folder, "the server must see it too")
        _check_buckets(bucket_bytes, dtype)
        self.folder, self.bucket_bytes, self.dtype = Path(folder).absolute(), bucket_bytes, dtype
        self.server_folder = server_folder or str(self.folder)

    def send(self, server: Server, model: torch.nn.Module) -> None:
        """Writes all weights and returns once the server has loaded them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for file in self.folder.glob("*.safetensors"):
            file.unlink()
        for number, bucket in enumerate(buckets(published_weights(model, dtype=self.dtype), self.bucket_bytes)):
            tensors = {name: tensor.cpu().contiguous() for name, tensor in bucket.items()}
            save_file(tensors, self.folder / f"model-{number:05d}.safetensors")
        server.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": self.server_folder}})


@dataclass(frozen=True)
class _Meta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Source:
    """vLLM's WeightSource: what will come, and the stream of it, in the same order."""

    model: torch.nn.Module
    dtype: torch.dtype | None

    def metadata(self) -> list[_Meta]:
        described = published_weights(self.model, dtype=self.dtype, meta=True)
        return [_Meta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in described]

    def __iter__(self):
        return published_weights(self.model, dtype=self.dtype)


@dataclass(frozen=True)
class _Client:
    """vLLM's VLLMWeightSyncClient over our HTTP client, which knows the API key."""

    server: Server

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.server.post("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self.server.post("/start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self.server.post("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.server.post("/finish_weight_update", {"weight_version": weight_version})


def _check_buckets(bucket_bytes: int, dtype: torch.dtype | None) -> None:
    check_int("bucket_bytes", bucket_bytes, least=1, fix="2**30 is the default")
    fits = dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)
    require(fits, "dtype", "a floating dtype of torch, or None", dtype, "as torch.bfloat16")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]

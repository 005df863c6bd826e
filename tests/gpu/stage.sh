#!/usr/bin/env bash
# stage.sh [BUNDLE [STAGE]]: on the GPU machine, unpack what `make gpu-bundle` made and prove that vLLM's kernels run.
# Source it, so that the environment stays: `. tests/gpu/stage.sh`. BUNDLE: the folder of the pieces (.out/gpu), STAGE:
# where they go (a folder in /tmp). The model's pieces stay where they are: whoever asks for the model joins them.
gpu_bundle=${1:-.out/gpu}; gpu_stage=${2:-${TMPDIR:-/tmp}/activation-explorer}; mkdir -p "$gpu_stage"
if [ ! -e "$gpu_stage/site.done" ]; then
    xz -T0 -dc "$gpu_bundle/site.tar.xz" | tar -C "$gpu_stage" -xf - \
        || python3 -c "import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2])" "$gpu_bundle/site.tar.xz" "$gpu_stage" \
        || return 1
    PYTHONPATH=$gpu_stage/site python3 -m compileall -q -j 0 "$gpu_stage/site" >/dev/null 2>&1
    touch "$gpu_stage/site.done"
fi
export PYTHONPATH=$gpu_stage/site EXPLORER_CACHE=$gpu_stage/cache
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 PYTHONUNBUFFERED=1
if [ ! -e "$gpu_stage/proven" ]; then
    nvidia-smi --query-gpu=name,driver_version,memory.used --format=csv,noheader
    python3 - <<'PY' && touch "$gpu_stage/proven"
import torch
import vllm._C, vllm._C_stable_libtorch, vllm.vllm_flash_attn._vllm_fa3_C

x = torch.randn(64, 2048, device="cuda", dtype=torch.bfloat16)
out = torch.empty_like(x)
torch.ops._C.rms_norm(out, x, torch.ones(2048, device="cuda", dtype=torch.bfloat16), 1e-5)
off = float((out.float() - torch.nn.functional.rms_norm(x.float(), (2048,), eps=1e-5)).abs().max())
print("vllm", vllm.__version__, "torch", torch.__version__, "rms_norm off by", off)
assert off < 0.05
PY
fi

# SOURCE is ORGANISATION/NAME or ORGANISATION/NAME@REVISION of Hugging Face; HF_TOKEN opens what is gated.
[ -e "$MARKER" ] && exit 0
[ -n "$ENDPOINT" ] && export HF_ENDPOINT="$ENDPOINT"
export HOME=/tmp HF_HOME=/tmp/hf HF_XET_CHUNK_CACHE_SIZE_BYTES=0 PYTHONPATH=/tmp/hub
python3 -m pip install --quiet --no-cache-dir --disable-pip-version-check --target /tmp/hub huggingface_hub==1.1.7
# Files that are complete are not fetched again; formats that Baton does not read are left out.
python3 - <<'PYTHON'
import os
from huggingface_hub import snapshot_download
name, _, revision = os.environ["SOURCE"].partition("@")
snapshot_download(
    name,
    revision=revision or None,
    local_dir=os.environ["MODEL"],
    ignore_patterns=["original/*", "metal/*", "onnx/*", "*.pth", "*.bin", "*.pt", "*.h5", "*.msgpack"],
)
PYTHON
touch "$MARKER"

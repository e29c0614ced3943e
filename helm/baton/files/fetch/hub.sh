# SOURCE is ORGANISATION/NAME or ORGANISATION/NAME@REVISION of Hugging Face; HF_TOKEN opens what is gated.
[ -e "$MARKER" ] && exit 0
# From here on the directory is no other source's: a marker that stayed would let pods of that one read these files.
rm -f "$MODEL"/.fetched-*
[ -n "$ENDPOINT" ] && export HF_ENDPOINT="$ENDPOINT"
export HOME=/tmp HF_HOME=/tmp/hf HF_XET_CHUNK_CACHE_SIZE_BYTES=0 PYTHONPATH=/tmp/hub
python3 -m pip install --quiet --no-cache-dir --disable-pip-version-check --target /tmp/hub huggingface_hub==1.1.7
# Files that are complete are not fetched again; formats that Baton does not read are left out.
python3 - <<'PYTHON'
import os, sys
from huggingface_hub import HfApi, snapshot_download
name, _, revision = os.environ["SOURCE"].partition("@")
model = os.environ["MODEL"]
# One commit, also if a branch moves meanwhile.
commit = HfApi().model_info(name, revision=revision or None).sha
snapshot = {
    "repo_id": name,
    "revision": commit,
    "local_dir": model,
    "ignore_patterns": ["original/*", "metal/*", "onnx/*", "*.pth", "*.bin", "*.pt", "*.h5", "*.msgpack", ".fetched-*"],
}
snapshot_download(**snapshot)
# Where the Hub does not answer, the library keeps a file that is there, also another source's: it is asked what it has now.
files = snapshot_download(**snapshot, dry_run=True)
for file in files:
    if file.will_download or file.commit_hash != commit:
        sys.exit(f"{file.filename} is not that of {name} at {commit}: the Hub did not answer")
# Files that this source lacks would be read with it. Folders stay: the claim may have other models in them.
names = {file.filename for file in files}
for entry in os.scandir(model):
    if not entry.is_dir(follow_symlinks=False) and entry.name not in names:
        print(f"{entry.name} is removed: the source lacks it", flush=True)
        os.unlink(entry.path)
PYTHON
touch "$MARKER"

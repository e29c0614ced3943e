# SOURCE is BUCKET/PREFIX; AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION open it.
[ -e "$MARKER" ] && exit 0
# From here on the directory is no other source's: a marker that stayed would let pods of that one read these files.
rm -f "$MODEL"/.fetched-*
export RCLONE_CONFIG=/tmp/rclone.conf RCLONE_S3_ENV_AUTH=true RCLONE_S3_PROVIDER=AWS RCLONE_CACHE_DIR=/tmp/rclone
[ -n "$ENDPOINT" ] && export RCLONE_S3_ENDPOINT="$ENDPOINT" RCLONE_S3_PROVIDER=Other
touch "$RCLONE_CONFIG"
# Files that are complete are not fetched again. A marker in the bucket, which was filled from a claim, says nothing here.
rclone copy --exclude '/.fetched-*' --transfers 8 --stats 1m --stats-one-line --stats-log-level NOTICE ":s3:$SOURCE" "$MODEL"
# Files that this source lacks would be read with it. Folders stay: the claim may have other models in them.
rclone sync --exclude '/.fetched-*' --max-depth 1 ":s3:$SOURCE" "$MODEL"
touch "$MARKER"

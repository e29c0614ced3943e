# SOURCE is BUCKET/PREFIX; AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION open it.
[ -e "$MARKER" ] && exit 0
export RCLONE_CONFIG=/tmp/rclone.conf RCLONE_S3_ENV_AUTH=true RCLONE_S3_PROVIDER=AWS RCLONE_CACHE_DIR=/tmp/rclone
[ -n "$ENDPOINT" ] && export RCLONE_S3_ENDPOINT="$ENDPOINT" RCLONE_S3_PROVIDER=Other
touch "$RCLONE_CONFIG"
# Files that are complete are not fetched again.
rclone copy --transfers 8 --stats 1m --stats-one-line --stats-log-level NOTICE ":s3:$SOURCE" "$MODEL"
touch "$MARKER"

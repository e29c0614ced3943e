# Computes prompts on prefill workers, and sees in the router's metrics that their KV moved.
moved() {
    curl --silent --show-error --fail ${OPENAI_API_KEY:+--header "authorization: Bearer $OPENAI_API_KEY"} "$ROUTER/metrics" |
        awk '/^baton_router_worker_handoff_bytes/ {bytes += $NF} END {printf "%.0f\n", bytes}'
}
before=$(moved)
# Prompts of their own: nothing of them is cached.
baton bench --quiet --url "$ROUTER" --requests 4 --concurrency 2 --input-tokens 64 --output-tokens 8 --timeout 120 \
    --seed "$(date +%s)" --extra-body '{"prefill_mode": "remote"}'
# Workers report at intervals.
for _ in 1 2 3 4 5 6 7 8 9 10; do
    after=$(moved)
    if [ "$after" -gt "$before" ]; then
        echo "handoffs moved $((after - before)) bytes"
        exit 0
    fi
    sleep 1
done
echo "no handoff moved a byte: $before before, $after after" >&2
exit 1

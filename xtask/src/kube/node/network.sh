# The network of a pod: a namespace NAME whose one interface has ADDRESS and reaches everything through GATEWAY, the node.
# Pods are routed, not bridged: so the node sees both directions of what it sends from a service to a pod.
NAME=$1 ADDRESS=$2 GATEWAY=$3
ip netns add "$NAME"
ip link add "$NAME" type veth peer name eth0 netns "$NAME"
ip -n "$NAME" address add "$ADDRESS/32" dev eth0
ip -n "$NAME" link set eth0 up
ip -n "$NAME" link set lo up
ip -n "$NAME" route add "$GATEWAY" dev eth0
ip -n "$NAME" route add default via "$GATEWAY"
ip link set "$NAME" up
ip route add "$ADDRESS/32" dev "$NAME"

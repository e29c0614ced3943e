# The network of the node: GATEWAY is its address for all pods; packets to SERVICES have a route, and rules change where they go.
GATEWAY=$1 SERVICES=$2
mount -t tmpfs tmpfs /run
mkdir /run/netns
ip link set lo up
ip address add "$GATEWAY/32" dev lo
ip route add "$SERVICES" dev lo src "$GATEWAY"
echo 1 >/proc/sys/net/ipv4/ip_forward

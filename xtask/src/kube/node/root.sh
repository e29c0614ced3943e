# The root of a container: this machine's programs, read-only, and nothing else of it but what is mounted.
# ROOT, PROGRAMS: folder with baton and etcd. NAMES: folder with the hosts file. Then for each mount: SOURCE TARGET ro|rw.
ROOT=$1 PROGRAMS=$2 NAMES=$3
shift 3
mkdir -p "$ROOT"
mount -t tmpfs -o mode=755 tmpfs "$ROOT"
cd "$ROOT"
mkdir -p usr proc sys tmp dev/shm etc/alternatives etc/ssl run/names
for name in bin sbin lib lib32 lib64; do
    if [ -L "/$name" ]; then
        cp -P "/$name" "$name"
    elif [ -d "/$name" ]; then
        mkdir "$name"
        mount --bind -o ro "/$name" "$name"
    fi
done
mount --bind -o ro /usr usr
mount --bind -o ro "$PROGRAMS" usr/local/bin
mount --bind -o ro /etc/ssl etc/ssl
mount --bind -o ro /etc/alternatives etc/alternatives
mount --bind -o ro "$NAMES" run/names
mount --rbind /proc proc
mount --rbind -o ro /sys sys
mount -t tmpfs -o mode=1777 tmpfs dev/shm
for name in null zero full random urandom; do
    touch "dev/$name"
    mount --bind "/dev/$name" "dev/$name"
done
echo 'hosts: files' >etc/nsswitch.conf
ln -s /run/names/hosts etc/hosts
while [ $# -gt 0 ]; do
    mkdir -p "./$2"
    mount --bind -o "$3" "$1" "./$2"
    shift 3
done
mount -o remount,ro "$ROOT"

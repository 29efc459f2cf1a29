#!/bin/sh
# Furnishes fresh namespaces (mount, network, pid, uts, ipc) for a cluster.
# Nothing here touches the machine: folders that the programs insist on are
# overlaid, and what is written ends with the namespace. Only cgroups have no
# such cover; they are below $2, and the keeper removes them.
#   sandbox.sh TIER CGROUP KEEP
set -eu
tier=$1 cgroup=$2 keep=$3 root=/run/bko address=192.168.64.2

mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs -o mode=0755,size=75% tmpfs /run
mkdir -p $root/home $root/logs $root/overlay $root/keep /run/lock /run/netns
# Logs of a failed run outlive it; bound before /tmp is covered, as it may be there.
mount --bind "$keep" $root/keep

for folder in /etc /var /tmp; do
    mkdir -p $root/overlay$folder/upper $root/overlay$folder/work
    chmod --reference=$folder $root/overlay$folder/upper
    mount -t overlay -o lowerdir=$folder,upperdir=$root/overlay$folder/upper,workdir=$root/overlay$folder/work overlay $folder
done
# Host-path volumes: not on an overlay, so that an overlay can be made on them.
mkdir -p /tmp/hostpath_pv
mount -t tmpfs -o mode=0755,size=75% tmpfs /tmp/hostpath_pv
mount --make-rshared /

echo node1 >/proc/sys/kernel/hostname
rm -f /etc/hosts /etc/resolv.conf
printf '127.0.0.1 localhost\n%s node1\n' $address >/etc/hosts
# Nobody answers here, so that a lookup fails at once; a node has DNS, below.
echo 'nameserver 127.0.0.1' >/etc/resolv.conf

# No way out: there is no default route.
ip link set lo up
ip link add eth0 type veth peer name eth0p
ip link set eth0p up
ip address add $address/24 dev eth0
ip link set eth0 up
ip route add 10.96.0.0/16 dev eth0
echo 1 >/proc/sys/net/ipv4/ip_forward
echo 0 >/proc/sys/net/ipv4/conf/all/rp_filter
echo 1 2>/dev/null >/proc/sys/net/bridge/bridge-nf-call-iptables || true

case $tier in
control-plane)
    # Every pod address is here: a test listens at the address of a pod that it plays.
    ip route add local 10.244.0.0/16 dev lo
    ;;
node)
    echo 'nameserver 10.96.0.10' >/etc/resolv.conf
    if [ -f /sys/fs/cgroup/cgroup.controllers ]; then
        mkdir -p "/sys/fs/cgroup/$cgroup"
        for folder in /sys/fs/cgroup "/sys/fs/cgroup/$cgroup"; do
            echo '+cpu +cpuset +io +memory +pids' 2>/dev/null >$folder/cgroup.subtree_control || true
        done
    else
        for hierarchy in /sys/fs/cgroup/*/; do mkdir -p "$hierarchy$cgroup"; done
    fi
    ;;
esac

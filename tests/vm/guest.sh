#!/bin/busybox sh
# Process 1 of the test machine that boot.py starts.
#
# Stage one runs in the initrd: load modules, stack a tmpfs over the host's read-only root, switch to it.
# Stage two runs on that root: dress it like a booted machine, run the command, report its exit code, power off.
# With SYSTEMD stage two becomes systemd, whose only service of ours is stage three: the command, the code, the end.
#
# /vm/job (written by boot.py) sets: KEEP, OPEN, USER_ID, CGROUP, DELEGATED, SYSTEMD. /vm/command is the command itself, as a script.
set -eu

assemble_root() {
    /bin/busybox --install -s /bin
    mkdir -p /proc /sys /dev /host /layers /new /keep
    mount -t proc proc /proc
    mount -t sysfs sysfs /sys
    mount -t devtmpfs devtmpfs /dev
    exec </dev/console >/dev/console 2>&1
    while read -r module; do insmod "/vm/modules/$module"; done </vm/modules/order

    # The host does not change under us while a test runs, so the most trusting cache is right.
    mount -t 9p -o "$HOST_OPTIONS" host /host
    mount -t tmpfs -o mode=755 layers /layers
    mkdir /layers/upper /layers/work
    mount -t overlay -o lowerdir=/host,upperdir=/layers/upper,workdir=/layers/work root /new

    mount --move /proc /new/proc
    mount --move /sys /new/sys
    mount --move /dev /new/dev
    scratch
    mkdir /new/run/vm
    cp -r /vm/. /bin/busybox /new/run/vm/
    exec switch_root /new /run/vm/busybox sh /run/vm/guest.sh supervise
}

# Plain tmpfs on /tmp and /run: overlayfs refuses an overlay as its upper layer, and tests build overlays there.
# What they would hide but the command needs (a clone below /tmp, say) is put back.
scratch() {
    number=0
    for path in $KEEP; do
        number=$((number + 1))
        mkdir -p "/keep/$number"
        mount --bind "/new$path" "/keep/$number"
    done
    mount -t tmpfs -o mode=1777 tmp /new/tmp
    mount -t tmpfs -o mode=755 run /new/run
    number=0
    for path in $KEEP; do
        number=$((number + 1))
        mkdir -p "/new$path"
        mount --move "/keep/$number" "/new$path"
    done
}

dress() {
    mount -t cgroup2 -o nsdelegate,memory_recursiveprot cgroup2 /sys/fs/cgroup
    mkdir -p /dev/pts /dev/shm /disk /exchange
    mount -t devpts -o mode=620,ptmxmode=666 devpts /dev/pts
    mount -t tmpfs -o mode=1777 shm /dev/shm
    [ -e /dev/fd ] || ln -s /proc/self/fd /dev/fd
    mount -t ext4 /dev/vda /disk
    chmod 1777 /disk
    mount -t 9p -o trans=virtio,version=9p2000.L,cache=none exchange /exchange
    "$BUSYBOX" ip link set lo up
    hostname holdfast-vm
    [ "$USER_ID" = 0 ] || admit_user
    [ -n "$SYSTEMD" ] || delegate
}

# The ordinary user gets a home, and a way to the interpreter where root's home is closed to others.
admit_user() {
    mkdir -p /tmp/home
    chown "$USER_ID:$USER_ID" /tmp/home /exchange
    for directory in $OPEN; do chmod a+x "$directory"; done
}

# A cgroup as systemd hands it to a service with Delegate=yes: every controller, owned by the user, and the command
# inside it, so that "no processes in an inner cgroup" binds here as it does on a real machine.
delegate() {
    path=/sys/fs/cgroup
    for name in $(echo "$CGROUP" | tr / ' '); do
        for controller in $(cat $path/cgroup.controllers); do echo "+$controller" >$path/cgroup.subtree_control; done
        path=$path/$name
        mkdir $path
    done
    path=/sys/fs/cgroup/$DELEGATED
    chown "$USER_ID:$USER_ID" $path $path/cgroup.procs $path/cgroup.threads $path/cgroup.subtree_control
}

# Of what the host would start, only D-Bus and logind: the rest costs minutes here, and is not ours to start. Everything
# else that a target wants is masked, and so is every generator.
become_systemd() {
    units=/etc/systemd/system
    generators=/etc/systemd/system-generators
    mkdir -p $units $generators /etc/systemd/system.conf.d
    for wanted in /usr/lib/systemd/system/*.target.wants/* /lib/systemd/system/*.target.wants/* $units/*.wants/*; do
        case "$(basename "$wanted")" in
            dbus.socket | dbus.service | systemd-logind.service | "*") ;;
            *) ln -sf /dev/null "$units/$(basename "$wanted")" ;;
        esac
    done
    for generator in /usr/lib/systemd/system-generators/* /lib/systemd/system-generators/*; do
        ln -sf /dev/null "$generators/$(basename "$generator")"
    done
    # Patience for a machine that is emulated, on a host that may be busy.
    printf '[Manager]\nDefaultTimeoutStartSec=600s\n' >/etc/systemd/system.conf.d/vm.conf
    printf '[Unit]\nRequires=dbus.socket systemd-logind.service holdfast-vm.service\n' >$units/holdfast-vm.target
    cat >$units/holdfast-vm.service <<EOF
[Unit]
Requires=dbus.socket systemd-logind.service
After=dbus.socket systemd-logind.service

[Service]
ExecStart=$BUSYBOX sh /run/vm/guest.sh serve
EOF
    echo "holdfast-vm:*:$USER_ID:$USER_ID::/tmp/home:/bin/sh" >>/etc/passwd
    echo "holdfast-vm:*:$USER_ID:" >>/etc/group
    # Where the host is a container systemd would take the machine for one, by this file.
    rm -f /.dockerenv
    exec /lib/systemd/systemd --unit=holdfast-vm.target --show-status=no --default-standard-output=null
}

serve() {
    exec 3>/dev/vport0p1
    mkfifo /run/vm/output
    cat /run/vm/output >/dev/vport0p2 3>&- &
    pump=$!
    echo ready >&3

    code=0
    /bin/sh /run/vm/command </dev/null >/run/vm/output 2>&1 3>&- || code=$?

    # A process the command left behind may hold the pipe open: the rest of the output has three seconds.
    (sleep 3 && kill $pump) 3>&- &
    wait $pump || true
    echo "exit $code" >&3
    echo o >/proc/sysrq-trigger
    sleep 60
}

BUSYBOX=/run/vm/busybox
case "${1:-}" in
    supervise)
        . /run/vm/job
        dress
        [ -z "$SYSTEMD" ] || become_systemd
        serve
        ;;
    serve)
        . /run/vm/job
        serve
        ;;
    *)
        export PATH=/bin
        . /vm/job
        assemble_root
        ;;
esac

#!/usr/bin/env bash
# Run tests on an emulated Sapphire Rapids, the first processor with AMX: sapphire_rapids.sh PYTEST-ARGUMENT...
#
#     sudo tests/emulators/sapphire_rapids.sh -k bf16_amx tests/backends/test_batch_invariance.py
#
# Bochs interprets every instruction, tiles included, below a Linux that lets processes use them. It shows what the
# kernels compute, on any x86-64 machine with Debian's debootstrap; what it says of time means nothing, and the first
# product of a kind compiles for minutes. The commit that is checked out is tested, not what is uncommitted.
# Everything is kept in LOWPREC_EMULATOR_DIR for the next run.
set -euo pipefail

bochs_version=3.0
here=$(cd "$(dirname "$0")" && pwd)
repository=$(cd "$here/../.." && pwd)
work=${LOWPREC_EMULATOR_DIR:-/var/tmp/lowprec-sapphire-rapids}
builder=$work/builder # a Debian with the sources of Bochs, where it is built and run
guest=$builder/guest  # what the emulated machine sees

inside() { # ROOT COMMAND...
    local root=$1
    shift
    env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 DEBIAN_FRONTEND=noninteractive chroot "$root" "$@"
}

make_emulator() {
    rm -rf --one-file-system "$builder"
    debootstrap --variant=minbase --include=ca-certificates trixie "$builder"
    sed 's/^deb /deb-src /' "$builder/etc/apt/sources.list" >"$builder/etc/apt/sources.list.d/sources.list"
    inside "$builder" apt-get -q update
    inside "$builder" apt-get -q -y --no-install-recommends install \
        bochsbios build-essential dpkg-dev e2fsprogs mtools python3 syslinux syslinux-common vgabios
    inside "$builder" sh -c "cd /root && apt-get -q source --download-only --tar-only bochs && mkdir -p bochs &&
        tar --strip-components=1 -C bochs -xf bochs_$bochs_version+dfsg.orig.tar.xz"
    cp "$here/bochs.patch" "$builder/root/"
    inside "$builder" sh -c 'cd /root/bochs && patch -p1 -F0 <../bochs.patch &&
        CFLAGS="-O3 -std=gnu11" CXXFLAGS="-O3 -std=gnu++14" ./configure --disable-docbook --enable-3dnow \
            --enable-amx --enable-avx --enable-cet --enable-evex --enable-fast-function-calls \
            --enable-handlers-chaining --enable-long-phy-address --enable-pci --enable-protection-keys \
            --enable-repeat-speedups --enable-svm --enable-uintr --enable-vmx=2 --enable-x86-64 \
            --with-nogui --without-x11 && make -j"$(nproc)"'
}

make_guest() {
    rm -rf "$guest"
    debootstrap --variant=minbase --include=ca-certificates,initramfs-tools,linux-image-amd64,python3,python3-venv \
        bookworm "$guest"
    # The emulated disk reads slowly: as little as boots.
    printf '%s\n' ata_piix sd_mod ext4 >>"$guest/etc/initramfs-tools/modules"
    sed -i 's/^MODULES=.*/MODULES=list/; s/^COMPRESS=.*/COMPRESS=gzip/' "$guest/etc/initramfs-tools/initramfs.conf"
    inside "$guest" update-initramfs -u
    rm -rf "$guest"/usr/share/{doc,locale,man} "$guest"/var/cache/apt/archives/*.deb
    install -m 755 /dev/stdin "$guest/sbin/run-job" <<'JOB'
#!/bin/sh
mount -t tmpfs tmp /tmp
mkdir -p /dev/shm && mount -t tmpfs shm /dev/shm
export PATH=/opt/venv/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 LOWPREC_CACHE_DIR=/opt/cache
cd /opt/lowprec && . /opt/job
echo "=== exit status $?"
sync
mount -o remount,ro /
echo o >/proc/sysrq-trigger
sleep 60
JOB
    # A mirror of this machine's may have a certificate of its own.
    [ ! -e /etc/ssl/certs/ca-certificates.crt ] || cp -L /etc/ssl/certs/ca-certificates.crt "$guest/etc/ssl/certs/"
    inside "$guest" python3 -m venv /opt/venv
}

install_lowprec() {
    rm -rf "$guest/opt/lowprec"
    mkdir "$guest/opt/lowprec"
    git -c safe.directory="$repository" -C "$repository" archive HEAD | tar -x -C "$guest/opt/lowprec"
    env -u VIRTUAL_ENV chroot "$guest" /opt/venv/bin/pip install -q -e "/opt/lowprec[cpu,cli]" \
        pytest hypothesis threadpoolctl opt_einsum array-api-strict
}

make_disks() { # PYTEST-ARGUMENT...
    printf 'python -m pytest -p no:cacheprovider --color=no' >"$guest/opt/job"
    printf ' %q' "$@" >>"$guest/opt/job"
    # What was compiled before is kept.
    if [ -e "$builder/root.img" ]; then
        rm -rf "$guest/opt/cache"
        inside "$builder" debugfs -R "rdump /opt/cache /guest/opt" /root.img >/dev/null 2>&1 || true
    fi
    rm -f "$builder"/{root,boot}.img
    truncate -s 3500M "$builder/root.img"
    inside "$builder" mke2fs -q -t ext4 -d /guest /root.img
    truncate -s 64M "$builder/boot.img"
    python3 - "$builder/boot.img" <<'TABLE'
import struct, sys

# One bootable partition of FAT16, from the second MiB to the end.
with open(sys.argv[1], "r+b") as disk:
    disk.seek(446)
    disk.write(struct.pack("<B3sB3sII", 0x80, b"\x20\x21\x00", 0x0E, b"\xfe\xff\xff", 2048, 63 * 2048))
    disk.seek(510)
    disk.write(b"\x55\xaa")
TABLE
    cat >"$builder/syslinux.cfg" <<'MENU'
DEFAULT linux
PROMPT 0
LABEL linux
KERNEL vmlinuz
INITRD initrd
APPEND root=/dev/sdb rw console=ttyS0,115200 init=/sbin/run-job quiet mitigations=off nokaslr audit=0 apparmor=0 intel_idle.max_cstate=0 idle=halt random.trust_cpu=on
MENU
    # syslinux opens the disk by its descriptor's name.
    mount -t proc proc "$builder/proc"
    inside "$builder" sh -ec '
        mformat -i /boot.img@@1M -T $((63 * 2048)) -h 16 -s 63 -H 2048 ::
        mcopy -i /boot.img@@1M /guest/boot/vmlinuz-* ::vmlinuz
        mcopy -i /boot.img@@1M /guest/boot/initrd.img-* ::initrd
        mcopy -i /boot.img@@1M /syslinux.cfg ::
        syslinux --install --offset 1048576 /boot.img
        dd if=/usr/lib/syslinux/mbr/mbr.bin of=/boot.img bs=440 count=1 conv=notrunc status=none'
    umount "$builder/proc"
}

start() {
    cat >"$builder/bochsrc" <<'MACHINE'
config_interface: textconfig
display_library: nogui
memory: guest=2048, host=2048
romimage: file=/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=/usr/share/vgabios/vgabios.bin
cpu: model=sapphire_rapids, count=1, ips=1000000000, reset_on_triple_fault=0, ignore_bad_msrs=1, exclude_features="la57"
pci: enabled=1, chipset=i440fx
ata0: enabled=1, ioaddr1=0x1f0, ioaddr2=0x3f0, irq=14
ata0-master: type=disk, path=/boot.img, mode=flat
ata0-slave: type=disk, path=/root.img, mode=flat
boot: disk
clock: sync=none
log: /bochs.log
panic: action=fatal
error: action=report
info: action=ignore
debug: action=ignore
com1: enabled=1, mode=file, dev=/serial.txt
MACHINE
    rm -f "$builder"/{root,boot}.img.lock
    : >"$builder/serial.txt"
    inside "$builder" sh -c 'exec /root/bochs/bochs -q -f /bochsrc </dev/null >/bochs.out 2>&1' &
    bochs=$!
    tail --pid="$bochs" -n +1 -F "$builder/serial.txt" 2>/dev/null
    wait "$bochs" || true
    bochs=
    grep -q '=== exit status 0' "$builder/serial.txt" || {
        grep -h PANIC "$builder"/bochs.{log,out} >&2
        return 1
    }
}

# Ctrl-C does not reach what runs in the background.
bochs=
leave() {
    [ -z "$bochs" ] || pkill -P "$bochs" || kill "$bochs" || true
    ! mountpoint -q "$builder/proc" || umount "$builder/proc"
}
trap leave EXIT
trap 'exit 130' INT TERM

if [ $# -eq 0 ] || [ "$(id -u)" -ne 0 ]; then
    sed -n '2,4p' "$0" >&2
    echo "# It needs root, for debootstrap and chroot." >&2
    exit 2
fi
mkdir -p "$work"
if ! [ -x "$builder/root/bochs/bochs" ] || ! cmp -s "$here/bochs.patch" "$builder/root/bochs.patch"; then
    make_emulator
fi
[ -x "$guest/opt/venv/bin/python" ] || make_guest
install_lowprec
make_disks "$@"
start

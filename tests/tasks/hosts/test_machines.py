"""Hosts in namespaces of their own: addresses, processes, disk and shared memory of one are not those of the other."""

import os


def test_two_hosts_are_two(machine, ssh_tools):
    first, second = machine(), machine(disk="8m")
    hosts = [each.host(each.base) for each in (first, second)]
    said = [host.hello() for host in hosts]
    assert [one["host"] for one in said] == [first.name, second.name]
    assert len({one["boot_id"] for one in said}) == 2
    assert first.listen != second.listen
    assert hosts[0].run(("cat", "/proc/1/comm")).stdout.strip() == "sshd"
    assert str(os.getpid()) not in hosts[0].run(("ls", "/proc")).stdout.split()
    hosts[0].run(("touch", "/dev/shm/mine", str(first.base / "file")))
    assert hosts[1].run(("ls", "/dev/shm")).stdout == ""
    assert not (first.base / "file").exists()  # on its own disk
    free = [host.facts(address="127.0.0.1", port=0)["disk"]["total_bytes"] for host in hosts]
    assert free == [256 << 20, 8 << 20]
    for host in hosts:
        host.close()


def test_a_host_that_is_switched_off_has_no_process_left_and_boots_anew(machine):
    one = machine()
    host = one.host(one.base)
    before = host.hello()["boot_id"]
    first = one.process.pid
    one.power_off()
    assert not os.path.exists(f"/proc/{first}")
    one.power_on()
    assert host.hello()["boot_id"] != before
    host.close()

// Keeps a stream busy while the host queues work to be timed; otherwise the time of short work is that of the host.
extern "C" __global__ void spin(long long cycles)
{
    long long start = clock64();
    while (clock64() - start < cycles) {}
}

// Keeps a stream busy while the host queues what is measured then: otherwise short work waits for the host, and its time
// is that of the host's calls.
extern "C" __global__ void spin(long long cycles)
{
    long long start = clock64();
    while (clock64() - start < cycles) {}
}

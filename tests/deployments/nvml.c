/* A management library of NVIDIA's driver with two cards, as far as Ray asks: built and loaded by test_this_machine.py. */
int nvmlInitWithFlags(unsigned int flags) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 2; return 0; }

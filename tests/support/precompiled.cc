// Compiles precompiled.h once; the program is never run.
int main() { return 0; }

/* Runs the kernels compiled for the true matrix unit on a CPU without it, for tests.
 *
 * Such a CPU refuses each of the unit's instructions with SIGILL. The handler here reads the
 * instruction, has amx_emulated.c compute it, and goes on behind it. So what is tested is the
 * compiler's code: which memory it has written when a tile is loaded, which registers it names.
 */
#define _GNU_SOURCE
#include "common/amx.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>

/* An operand in memory: base + displacement, and index << scale, which is a tile's stride. */
typedef struct {
    uint64_t address;
    int64_t stride;
    int length; /* bytes of ModRM and what follows it */
} operand;

static uint64_t general(const ucontext_t *context, int number) {
    static const int places[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP,
                                   REG_RSI, REG_RDI, REG_R8,  REG_R9,  REG_R10, REG_R11,
                                   REG_R12, REG_R13, REG_R14, REG_R15};
    return (uint64_t)context->uc_mcontext.gregs[places[number]];
}

static operand read_operand(const ucontext_t *context, const uint8_t *modrm, int base_high,
                            int index_high) {
    const int mod = modrm[0] >> 6, rm = modrm[0] & 7, has_sib = rm == 4;
    const uint8_t *at = modrm + 1 + has_sib;
    operand found = {0};
    int base = rm, needs_wide = mod == 2;
    if (has_sib) {
        const int index = (modrm[1] >> 3 & 7) | index_high;
        base = modrm[1] & 7;
        if (index != 4) found.stride = (int64_t)(general(context, index) << (modrm[1] >> 6));
    }
    if (mod == 0 && base == 5) needs_wide = 1; /* no base: absolute, or from the next instruction */
    else found.address = general(context, base | base_high);
    if (needs_wide) {
        int32_t displacement;
        memcpy(&displacement, at, 4);
        found.address += (uint64_t)(int64_t)displacement;
        at += 4;
    } else if (mod == 1) {
        found.address += (uint64_t)(int64_t)(int8_t)*at++;
    }
    found.length = (int)(at - modrm);
    if (mod == 0 && rm == 5) found.address += (uint64_t)(uintptr_t)at;
    return found;
}

/* Between registers: C is `reg`, A is `rm`, B is `third`. 0 where it is not one of the unit's. */
static int compute(int opcode, int prefix, int reg, int rm, int third) {
    enum { NONE, P66, PF3, PF2 };
    if (opcode == 0x49 && prefix == NONE) ft_emulated_release();
    else if (opcode == 0x49 && prefix == PF2) ft_emulated_zero(reg);
    else if (opcode == 0x5c && prefix == PF3) ft_emulated_dot_bf16(reg, rm, third);
    else if (opcode == 0x5e && prefix == PF2) ft_emulated_dot_bytes(reg, rm, third, 1, 1);
    else if (opcode == 0x5e && prefix == PF3) ft_emulated_dot_bytes(reg, rm, third, 1, 0);
    else if (opcode == 0x5e && prefix == P66) ft_emulated_dot_bytes(reg, rm, third, 0, 1);
    else return 0;
    return 1;
}

static int move(int opcode, int prefix, int reg, const operand *memory) {
    void *address = (void *)(uintptr_t)memory->address;
    if (opcode == 0x49 && prefix == 0) ft_emulated_configure(address);
    else if (opcode == 0x4b && prefix == 3) ft_emulated_load(reg, address, memory->stride);
    else if (opcode == 0x4b && prefix == 2) ft_emulated_store(reg, address, memory->stride);
    else return 0;
    return 1;
}

static _Atomic long num_run;

static void run_one(int signal, siginfo_t *info, void *argument) {
    ucontext_t *context = argument;
    const uint8_t *code = (const uint8_t *)context->uc_mcontext.gregs[REG_RIP];
    const int prefix = code[2] & 3, third = ~(code[2] >> 3) & 15, opcode = code[3];
    const int index_high = code[1] & 0x40 ? 0 : 8, base_high = code[1] & 0x20 ? 0 : 8;
    const int mod = code[4] >> 6, reg = code[4] >> 3 & 7, rm = code[4] & 7;
    int length = 5, known = code[0] == 0xc4 && (code[1] & 31) == 2; /* VEX, map 0F38 */
    if (known && mod == 3) {
        known = compute(opcode, prefix, reg, rm, third);
    } else if (known) {
        const operand memory = read_operand(context, code + 4, base_high, index_high);
        known = move(opcode, prefix, reg, &memory);
        length = 4 + memory.length;
    }
    if (!known) {
        fprintf(stderr, "not an instruction of the matrix unit: %02x %02x %02x %02x %02x\n",
                code[0], code[1], code[2], code[3], code[4]);
        abort();
    }
    num_run++;
    context->uc_mcontext.gregs[REG_RIP] += length;
    (void)signal, (void)info;
}

/* From now on, in this process. */
FT_EXPORT void trap_install(void) {
    struct sigaction action = {.sa_sigaction = run_one, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigaction(SIGILL, &action, NULL);
}

/* Instructions so far. */
FT_EXPORT long trap_count(void) { return num_run; }

// SHA-256 (FIPS 180-4) of many independent messages at once, one in each 32-bit lane of the processor's vectors.
//
// Compiled with -mavx512f -mavx512bw for 16 lanes, else with -mavx2 for 8. A lane whose message has ended takes the
// next one, so messages may have any lengths; a single long message gains nothing from this.

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define LANES 16
#else
#define LANES 8
#endif
#define BLOCK 64

typedef uint32_t Vector __attribute__((vector_size(4 * LANES)));

#if LANES == 16
#define RAW __m512i
#define ROTATED(x, n) ((Vector)_mm512_ror_epi32((RAW)(x), n))
#define XOR3(x, y, z) ((Vector)_mm512_ternarylogic_epi32((RAW)(x), (RAW)(y), (RAW)(z), 0x96))
#define CHOSEN(x, y, z) ((Vector)_mm512_ternarylogic_epi32((RAW)(x), (RAW)(y), (RAW)(z), 0xCA))
#define MAJORITY(x, y, z) ((Vector)_mm512_ternarylogic_epi32((RAW)(x), (RAW)(y), (RAW)(z), 0xE8))
#else
#define RAW __m256i
#define ROTATED(x, n) (((x) >> (n)) | ((x) << (32 - (n))))
#define XOR3(x, y, z) ((x) ^ (y) ^ (z))
#define CHOSEN(x, y, z) ((z) ^ ((x) & ((y) ^ (z))))
#define MAJORITY(x, y, z) (((x) & (y)) | ((z) & ((x) | (y))))
#endif

static const uint32_t ROUND[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};
static const uint32_t START[8] = {
    0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
};

struct Lane {
  const uint8_t* next;  // the block to hash next
  size_t blocks;        // how many follow each other from there
  size_t message;       // its number
  bool last;            // these blocks end the message; they are in `ending`
  bool busy;
  uint8_t ending[2 * BLOCK];
};

// The 16 words of one block of each lane, word by word.
static inline void load_words(const uint8_t* const at[LANES], Vector words[16]) {
#if LANES == 16
  const RAW swap = _mm512_broadcast_i32x4(_mm_set_epi8(12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3));
  RAW row[16], mixed[16];
  for (int i = 0; i < 16; i++) row[i] = _mm512_shuffle_epi8(_mm512_loadu_si512(at[i]), swap);
  for (int i = 0; i < 16; i += 2) {
    mixed[i] = _mm512_unpacklo_epi32(row[i], row[i + 1]);
    mixed[i + 1] = _mm512_unpackhi_epi32(row[i], row[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    row[i] = _mm512_unpacklo_epi64(mixed[i], mixed[i + 2]);
    row[i + 1] = _mm512_unpackhi_epi64(mixed[i], mixed[i + 2]);
    row[i + 2] = _mm512_unpacklo_epi64(mixed[i + 1], mixed[i + 3]);
    row[i + 3] = _mm512_unpackhi_epi64(mixed[i + 1], mixed[i + 3]);
  }
  for (int j = 0; j < 4; j++) {  // row[4 i + j] has, in its 128-bit quarter k, word 4 k + j of lanes 4 i to 4 i + 3
    RAW even = _mm512_shuffle_i32x4(row[j], row[4 + j], 0x88), odd = _mm512_shuffle_i32x4(row[j], row[4 + j], 0xdd);
    RAW even2 = _mm512_shuffle_i32x4(row[8 + j], row[12 + j], 0x88);
    RAW odd2 = _mm512_shuffle_i32x4(row[8 + j], row[12 + j], 0xdd);
    words[j] = (Vector)_mm512_shuffle_i32x4(even, even2, 0x88);
    words[4 + j] = (Vector)_mm512_shuffle_i32x4(odd, odd2, 0x88);
    words[8 + j] = (Vector)_mm512_shuffle_i32x4(even, even2, 0xdd);
    words[12 + j] = (Vector)_mm512_shuffle_i32x4(odd, odd2, 0xdd);
  }
#else
  const RAW swap = _mm256_broadcastsi128_si256(_mm_set_epi8(12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3));
  for (int half = 0; half < 2; half++) {
    RAW row[8], mixed[8];
    for (int i = 0; i < 8; i++)
      row[i] = _mm256_shuffle_epi8(_mm256_loadu_si256((const RAW*)(at[i] + 32 * half)), swap);
    for (int i = 0; i < 8; i += 2) {
      mixed[i] = _mm256_unpacklo_epi32(row[i], row[i + 1]);
      mixed[i + 1] = _mm256_unpackhi_epi32(row[i], row[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
      row[i] = _mm256_unpacklo_epi64(mixed[i], mixed[i + 2]);
      row[i + 1] = _mm256_unpackhi_epi64(mixed[i], mixed[i + 2]);
      row[i + 2] = _mm256_unpacklo_epi64(mixed[i + 1], mixed[i + 3]);
      row[i + 3] = _mm256_unpackhi_epi64(mixed[i + 1], mixed[i + 3]);
    }
    for (int j = 0; j < 4; j++) {
      words[8 * half + j] = (Vector)_mm256_permute2x128_si256(row[j], row[4 + j], 0x20);
      words[8 * half + 4 + j] = (Vector)_mm256_permute2x128_si256(row[j], row[4 + j], 0x31);
    }
  }
#endif
}

#define ROUND_OF(a, b, c, d, e, f, g, h, i, w)                                                         \
  do {                                                                                                 \
    Vector t = (h) + XOR3(ROTATED(e, 6), ROTATED(e, 11), ROTATED(e, 25)) + CHOSEN(e, f, g) + (w) + ROUND[i]; \
    (d) += t;                                                                                          \
    (h) = t + XOR3(ROTATED(a, 2), ROTATED(a, 13), ROTATED(a, 22)) + MAJORITY(a, b, c);                 \
  } while (0)

// The next word of the schedule, in place of the one 16 before it.
#define SCHEDULE(i)                                                                                             \
  (words[(i) & 15] += XOR3(ROTATED(words[((i) + 14) & 15], 17), ROTATED(words[((i) + 14) & 15], 19),            \
                           words[((i) + 14) & 15] >> 10) +                                                      \
                      words[((i) + 9) & 15] +                                                                   \
                      XOR3(ROTATED(words[((i) + 1) & 15], 7), ROTATED(words[((i) + 1) & 15], 18), words[((i) + 1) & 15] >> 3))

#define EIGHT_ROUNDS(i, W)                          \
  ROUND_OF(a, b, c, d, e, f, g, h, (i), W(i));         \
  ROUND_OF(h, a, b, c, d, e, f, g, (i) + 1, W((i) + 1)); \
  ROUND_OF(g, h, a, b, c, d, e, f, (i) + 2, W((i) + 2)); \
  ROUND_OF(f, g, h, a, b, c, d, e, (i) + 3, W((i) + 3)); \
  ROUND_OF(e, f, g, h, a, b, c, d, (i) + 4, W((i) + 4)); \
  ROUND_OF(d, e, f, g, h, a, b, c, (i) + 5, W((i) + 5)); \
  ROUND_OF(c, d, e, f, g, h, a, b, (i) + 6, W((i) + 6)); \
  ROUND_OF(b, c, d, e, f, g, h, a, (i) + 7, W((i) + 7))

#define GIVEN(i) words[i]

static void hash_blocks(Vector state[8], const uint8_t* at[LANES], const size_t step[LANES], size_t count) {
  Vector words[16];
  while (count--) {
    load_words(at, words);
    for (int i = 0; i < LANES; i++) at[i] += step[i];
    Vector a = state[0], b = state[1], c = state[2], d = state[3];
    Vector e = state[4], f = state[5], g = state[6], h = state[7];
    EIGHT_ROUNDS(0, GIVEN);
    EIGHT_ROUNDS(8, GIVEN);
    for (int i = 16; i < 64; i += 16) {
      EIGHT_ROUNDS(i, SCHEDULE);
      EIGHT_ROUNDS(i + 8, SCHEDULE);
    }
    state[0] += a, state[1] += b, state[2] += c, state[3] += d;
    state[4] += e, state[5] += f, state[6] += g, state[7] += h;
  }
}

static void store_big_endian(uint8_t* to, uint64_t value, int bytes) {
  for (int i = 0; i < bytes; i++) to[i] = (uint8_t)(value >> (8 * (bytes - 1 - i)));
}

// The rest of a message after its whole blocks, with the padding and the length.
static void begin_ending(Lane* lane, const uint8_t* rest, size_t size) {
  size_t left = size % BLOCK;
  memset(lane->ending, 0, sizeof lane->ending);
  if (left) memcpy(lane->ending, rest, left);
  lane->ending[left] = 0x80;
  lane->blocks = left + 9 <= BLOCK ? 1 : 2;
  store_big_endian(lane->ending + lane->blocks * BLOCK - 8, (uint64_t)size * 8, 8);
  lane->next = lane->ending;
  lane->last = true;
}

// Writes the 32 bytes of each message's digest to `digests`, in order.
extern "C" void serin_sha256_many(const uint8_t* const* messages, const size_t* sizes, size_t count, uint8_t* digests) {
  alignas(64) Vector state[8];
  alignas(64) Lane lanes[LANES];
  static const uint8_t nothing[BLOCK] = {0};
  size_t given = 0, busy = 0;
  memset(state, 0, sizeof state);
  memset(lanes, 0, sizeof lanes);
  while (true) {
    for (int i = 0; i < LANES; i++) {
      Lane* lane = &lanes[i];
      if (lane->busy && !lane->blocks && lane->last) {
        for (int word = 0; word < 8; word++) store_big_endian(digests + 32 * lane->message + 4 * word, state[word][i], 4);
        lane->busy = false;
        busy--;
      }
      if (!lane->busy && given < count) {
        lane->message = given++;
        lane->next = messages[lane->message];
        lane->blocks = sizes[lane->message] / BLOCK;
        lane->last = false;
        lane->busy = true;
        busy++;
        for (int word = 0; word < 8; word++) state[word][i] = START[word];
      }
      if (lane->busy && !lane->blocks) begin_ending(lane, lane->next, sizes[lane->message]);
    }
    if (!busy) return;
    const uint8_t* at[LANES];
    size_t step[LANES], together = SIZE_MAX;
    for (int i = 0; i < LANES; i++) {
      at[i] = lanes[i].busy ? lanes[i].next : nothing;
      step[i] = lanes[i].busy ? BLOCK : 0;
      if (lanes[i].busy && lanes[i].blocks < together) together = lanes[i].blocks;
    }
    hash_blocks(state, at, step, together);
    for (int i = 0; i < LANES; i++) {
      if (!lanes[i].busy) continue;
      lanes[i].next = at[i];
      lanes[i].blocks -= together;
    }
  }
}
